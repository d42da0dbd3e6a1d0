"""`/lora-adapters`: how strongly the adapters of a model act, in llama-server's form."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from dflash_local.fit.options import scaled_files
from dflash_local.model import Model
from dflash_local.options import lora_of
from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.answering.bounds import LoraScales, lora_scales
from dflash_local.server.models.source import ModelSource

router = APIRouter()


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
