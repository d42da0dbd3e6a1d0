"""`/v1/models`: what is served, in OpenAI's shape, or in Anthropic's for its clients.

Where one model is served, requests may name any: editors send names of their own, and the answer
names ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request

from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.anthropic.errors import VERSION_HEADER
from dflash_local.server.models.served_model import ModelHost

router = APIRouter()


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are served, loaded or not: `status` tells, as llama-server's router does."""
    entries = [_entry(request, host) for host in pool_of(request).hosts.values()]
    if VERSION_HEADER in request.headers:
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
        return {"data": list(map(_anthropic, entries)), "has_more": False, **ends}
    return {"object": "list", "data": entries}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """The model of that name. Another one is not found."""
    entry = _entry(request, pool_of(request).named(name))
    return _anthropic(entry) if VERSION_HEADER in request.headers else entry


def _entry(request: Request, host: ModelHost) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": host.name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "dflash-local",
        "status": {"value": host.state, **({"failed": True} if host.fault else {})},
    }
    if host.model is not None:
        told["meta"] = {"n_ctx": host.model.n_ctx, "n_vocab": host.model.target.n_vocab}
    return told


def _anthropic(entry: Mapping[str, Any]) -> dict[str, Any]:
    """https://platform.claude.com/docs/en/api/models"""
    created = datetime.fromtimestamp(entry["created"], timezone.utc)
    told = {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
    }
    if "meta" in entry:
        told |= dict.fromkeys(("max_input_tokens", "max_tokens"), entry["meta"]["n_ctx"])
    return told
