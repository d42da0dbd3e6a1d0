"""`/v1/models`: the one model that is served, in OpenAI's shape, or in Anthropic's for its clients.

Requests may name any model: editors send names of their own, and the answer names ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request

from dflash_local.model import Model
from dflash_local.server.anthropic_errors import VERSION_HEADER
from dflash_local.server.errors import ApiError
from dflash_local.server.settings import Settings

router = APIRouter()


def model_name(model: Model, settings: Settings) -> str:
    """What answers call the model: the alias, or the stem of its file's name."""
    return settings.alias or model.target.path.stem


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    entry = _entry(request)
    if VERSION_HEADER in request.headers:
        ends = {"first_id": entry["id"], "last_id": entry["id"]}
        return {"data": [_anthropic(entry)], "has_more": False, **ends}
    return {"object": "list", "data": [entry]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """The model of that name. Another one is not found."""
    entry = _entry(request)
    if name != entry["id"]:
        raise ApiError(
            404,
            f"the model {name[:256]!r} is not served here; {entry['id']!r} is",
            param="model",
            code="model_not_found",
        )
    return _anthropic(entry) if VERSION_HEADER in request.headers else entry


def _anthropic(entry: Mapping[str, Any]) -> dict[str, Any]:
    """https://platform.claude.com/docs/en/api/models"""
    created = datetime.fromtimestamp(entry["created"], timezone.utc)
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": entry["meta"]["n_ctx"],
        "max_tokens": entry["meta"]["n_ctx"],
        "lifecycle": "active",
    }


def _entry(request: Request) -> dict[str, Any]:
    state = request.app.state
    model: Model = state.model
    return {
        "id": model_name(model, state.settings),
        "object": "model",
        "created": state.created,
        "owned_by": "dflash-local",
        "meta": {
            "n_ctx": model.n_ctx,
            "n_vocab": model.target.n_vocab,
        },
    }
