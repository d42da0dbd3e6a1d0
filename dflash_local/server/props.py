"""`/props`: what is served and how, in llama-server's shape."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from dflash_local import runtime
from dflash_local.model import Model
from dflash_local.server.models import model_name
from dflash_local.server.sampling_fields import DEFAULTS

router = APIRouter()


@router.get("/props")
async def props(request: Request) -> dict[str, Any]:
    """The model's name, its context, its slots and its chat template; how it drafts where a request
    does not say. No path of this machine."""
    model: Model = request.app.state.model
    vocabulary = model.target.vocabulary
    name = model_name(model, request.app.state.settings)
    return {
        "default_generation_settings": {
            "n_ctx": model.n_ctx,
            "speculative": model.drafter is not None,
            "params": DEFAULTS,
        },
        "draft_width": model.draft_width,
        "max_draft_width": model.engine.max_width,
        "total_slots": model.target.options.n_seq,
        "model_alias": name,
        "model_path": model.target.path.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": model.target.chat_template or "",
        "bos_token": vocabulary.bos or "",
        "eos_token": vocabulary.eos or "",
        "build_info": f"dflash-local {request.app.version}, {runtime.llama_build()}",
    }
