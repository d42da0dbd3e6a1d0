"""`/slots`: what each slot is at, in llama-server's shape, without a word of anyone's prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from dflash_local.model import Model

router = APIRouter()


@router.get("/slots")
async def slots(request: Request) -> list[dict[str, Any]]:
    """Whether each slot is at work, and how many tokens its caches hold."""
    model: Model = request.app.state.model
    status = model.status()
    return [
        {
            "id": slot.id,
            "n_ctx": status.n_ctx,
            "speculative": model.drafter is not None,
            "is_processing": slot.busy,
            "n_cached_tokens": slot.n_cached_tokens,
        }
        for slot in status.slots
    ]
