"""`/props`: the served models and settings, and `/lora-adapters`: how strongly the adapters of a
model act; in llama-server's form.

They tell no path of this machine.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from dflash_local.errors import FileError
from dflash_local.fit.options import scaled_files
from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.options import lora_of
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.answering.bounds import LoraScales, lora_scales
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


@router.get("/lora-adapters")
async def lora_adapters(request: Request, model: str | None = None) -> list[dict[str, Any]]:
    """The adapters that a model was started with, and how strongly they act for requests that do
    not say. No path of this machine is told."""
    return [
        {"id": index, "path": Path(path).name, "scale": scale}
        for index, (path, scale) in enumerate(_adapters(pool_of(request).find(model).source))
    ]


@router.post("/lora-adapters")
async def set_lora_adapters(
    request: Request, body: Annotated[LoraScales, Body()], model: str | None = None
) -> Mapping[str, bool]:
    """Set that, for requests that begin from now on. Adapters that are left out do not act."""
    served = pool_of(request).find(model)
    adapters = _adapters(served.source)
    scales = lora_of({"lora": lora_scales(body)}, [scale for _, scale in adapters])
    lora = [(path, scale) for (path, _), scale in zip(adapters, scales, strict=True)]
    served.source = replace(served.source, options={**served.source.options, "lora": lora})
    if isinstance(served.model, Model):
        served.model.lora = scales
    return {"success": True}


def _adapters(source: ModelSource) -> tuple[tuple[str, float], ...]:
    return scaled_files("lora", source.options.get("lora") or ())
