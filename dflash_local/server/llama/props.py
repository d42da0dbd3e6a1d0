"""`/props`: the served models and settings, in llama-server's form.

It tells no path of this machine.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from dflash_local.errors import FileError
from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.answering.sampling_fields import usual_sampling
from dflash_local.server.models.source import ModelSource

router = APIRouter()


@router.get("/props")
async def props(request: Request, model: str | None = None) -> dict[str, Any]:
    """A model's name, its context, its slots and its chat template; how it drafts for requests that
    do not say. A model that is not loaded tells less, and stays so: who only looks neither loads it
    nor keeps it loaded."""
    served = pool_of(request).find(model)
    build = f"dflash-local {request.app.version}, {runtime.llama_build()}"
    shared = {
        "model_alias": served.name,
        "model_path": served.source.target.name,
        "modalities": {
            "vision": served.writer is not None and served.writer.projector is not None,
            "audio": False,
        },
        "is_sleeping": served.model is None,
        "build_info": build,
    }
    if served.writer is None:
        params = await asyncio.to_thread(_params, served.source)
        return {"default_generation_settings": {"params": params}, **shared}
    return {**_props(served.writer, served.source.max_tokens), **shared}


@router.get("/version", include_in_schema=False)
async def version(request: Request) -> dict[str, str]:
    """Of this server, in vLLM's form."""
    return {"version": request.app.version}


def _params(source: ModelSource) -> Mapping[str, float]:
    """The defaults of a model that is not loaded."""
    try:
        length = source.max_tokens or source.defaults.answer_length or -1
        return {**source.defaults.for_chats, "n_predict": length}
    except (FileError, OSError):  # the first request will be told
        return CHAT_SAMPLING


def _props(model: Model, max_tokens: int | None) -> dict[str, Any]:
    vocabulary = model.target.vocabulary
    return {
        "default_generation_settings": {
            "n_ctx": model.n_ctx,
            "speculative": model.drafter is not None,
            "params": {
                **usual_sampling(model),
                "n_predict": max_tokens or model.answer_length or -1,
            },
        },
        "draft_width": model.draft_width,
        "max_draft_width": model.engine.max_width,
        "total_slots": model.target.options.n_seq,
        "chat_template": model.target.chat_template or "",
        "bos_token": vocabulary.bos or "",
        "eos_token": vocabulary.eos or "",
    }
