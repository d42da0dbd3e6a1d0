"""`/slots`: what each slot is at, in llama-server's shape, without a word of anyone's prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from dflash_local.server.answering.api_answer import pool_of

router = APIRouter()


@router.get("/slots")
async def slots(request: Request, model: str | None = None) -> list[dict[str, Any]]:
    """Whether each slot of a model is at work, and how many tokens its caches hold; none where the
    model is not loaded."""
    loaded = pool_of(request).find(model).model
    if loaded is None:
        return []
    status = loaded.status()
    return [
        {
            "id": slot.id,
            "n_ctx": status.n_ctx,
            "speculative": loaded.drafter is not None,
            "is_processing": slot.busy,
            "n_cached_tokens": slot.n_cached_tokens,
        }
        for slot in status.slots
    ]
