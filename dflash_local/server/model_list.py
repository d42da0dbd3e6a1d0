"""`/v1/models`: the served models, in OpenAI's form, or in Anthropic's for its clients; and
`/library`: those that could be."""

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool

from dflash_local.server.answering.api_answer import library_of, pool_of
from dflash_local.server.http.errors import ANTHROPIC_HEADER
from dflash_local.server.models.served_model import ServedModel

router = APIRouter()


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """The models that are served. As with llama-server's router `status` tells
    which are loaded."""
    entries = [_entry(request, served) for served in pool_of(request).models.values()]
    if ANTHROPIC_HEADER in request.headers:
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
        return {"data": list(map(_anthropic, entries)), "has_more": False, **ends}
    return {"object": "list", "data": entries}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """The model of exactly that name, also where a server of one model would take any."""
    entry = _entry(request, pool_of(request).named(name))
    return _anthropic(entry) if ANTHROPIC_HEADER in request.headers else entry


@router.get("/library")
async def library(request: Request) -> dict[str, Any]:
    """The models that have a name, as `dflash-local list --json` has them: their bytes, the files
    here, and their fit to this machine."""
    return await run_in_threadpool(library_of(request).as_dict)


def _entry(request: Request, served: ServedModel) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": served.name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "dflash-local",
        "aliases": served.source.aliases,
        "tags": served.source.tags,
        "use": served.source.use,
        "status": {"value": served.state, **({"failed": True} if served.failure else {})},
    }
    if served.model is not None:
        entry["meta"] = {"n_ctx": served.model.n_ctx, "n_vocab": served.model.n_vocab}
    return entry


def _anthropic(entry: Mapping[str, Any]) -> dict[str, Any]:
    """https://platform.claude.com/docs/en/api/models"""
    created = datetime.fromtimestamp(entry["created"], timezone.utc)
    fields = {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": f"{created:%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
    }
    if "meta" in entry:
        fields |= dict.fromkeys(("max_input_tokens", "max_tokens"), entry["meta"]["n_ctx"])
    return fields
