"""`/props`: the served models and settings; `/lora-adapters`: how strongly the adapters of a model
act; `/slots`: the state of its slots, and their content as files; in llama-server's form.

They tell no path of this machine, and nothing of a prompt."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Path, Request
from pydantic import BaseModel

from dflash_local.errors import FileError
from dflash_local.fit.options import scaled_files
from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.options import lora_of
from dflash_local.pairs.defaults import CHAT_SAMPLING
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import on_model, pool_of
from dflash_local.server.answering.bounds import LoraScales, lora_scales
from dflash_local.server.answering.sampling_fields import usual_sampling
from dflash_local.server.http.errors import ApiError, bad_request, check_switch
from dflash_local.server.http.security import client
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
        {"id": index, "path": FilePath(path).name, "scale": scale}
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


@router.get("/slots")
async def slots(request: Request, model: str | None = None) -> list[dict[str, Any]]:
    """For each slot of a model whether it is busy, and the number of tokens in its caches; nothing
    where the model is not loaded."""
    check_switch(request.app.state.settings.slots, "--no-slots")
    loaded = pool_of(request).find(model).writer
    if loaded is None:
        return []
    status = loaded.status()
    return [
        {
            "id": slot.id,
            "n_ctx": loaded.n_ctx,
            "speculative": loaded.drafter is not None,
            "is_processing": slot.busy,
            "n_cached_tokens": slot.n_cached_tokens,
        }
        for slot in status.slots
    ]


class SlotFile(BaseModel):
    """`filename`: of a file in the folder of `--slot-save-path`."""

    filename: bounds.Name | None = None


@router.post("/slots/{id_slot}")
async def change_slot(
    request: Request,
    id_slot: Annotated[int, Path(ge=0, le=bounds.MAX_INT)],
    action: Literal["save", "restore", "erase"],
    body: SlotFile | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Save a slot's content in a file, restore it from one, or erase it, once no request is
    running. Needs `--slot-save-path`. Of other API keys neither texts nor files are reached."""
    source = pool_of(request).find(model).source
    if source.options.get("slot_save_path") is None:
        message = "slots are not saved here; start the server with --slot-save-path DIR"
        raise ApiError(501, message, type="not_supported_error")
    name = body.filename if body else None
    if name is None and action != "erase":
        raise bad_request(f"{action} needs the name of a file", param="filename")

    owner = client.get()  # the model's thread does not have it

    def change(loaded: Model, name: str) -> dict[str, Any]:
        begun_at = time.perf_counter()
        if action == "erase":
            return {"id_slot": id_slot, "n_erased": loaded.erase_slot(id_slot, owner=owner)}
        work = loaded.save_slot if action == "save" else loaded.restore_slot
        n, n_bytes = work(id_slot, name, owner=owner)
        counts = (
            {"n_saved": n, "n_written": n_bytes}
            if action == "save"
            else {"n_restored": n, "n_read": n_bytes}
        )
        ms = 1000 * (time.perf_counter() - begun_at)
        return {"id_slot": id_slot, "filename": name, **counts, "timings": {f"{action}_ms": ms}}

    return await on_model(request, model, name or "", change)
