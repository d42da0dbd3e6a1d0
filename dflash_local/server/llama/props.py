"""`/props`: what is served and how, in llama-server's shape."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from dflash_local.llama import runtime
from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.answering.sampling_fields import DEFAULTS
from dflash_local.server.models.served import Served

router = APIRouter()


@router.get("/props")
async def props(request: Request, model: str | None = None) -> dict[str, Any]:
    """A model's name, its context, its slots and its chat template; how it drafts where a request
    does not say. No path of this machine. The model is loaded for it."""
    async with pool_of(request).use(model) as served:
        return _props(served, request.app.version)


def _props(served: Served, version: str) -> dict[str, Any]:
    model = served.model
    vocabulary = model.target.vocabulary
    return {
        "default_generation_settings": {
            "n_ctx": model.n_ctx,
            "speculative": model.drafter is not None,
            "params": DEFAULTS,
        },
        "draft_width": model.draft_width,
        "max_draft_width": model.engine.max_width,
        "total_slots": model.target.options.n_seq,
        "model_alias": served.name,
        "model_path": model.target.path.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": model.target.chat_template or "",
        "bos_token": vocabulary.bos or "",
        "eos_token": vocabulary.eos or "",
        "build_info": f"dflash-local {version}, {runtime.llama_build()}",
    }
