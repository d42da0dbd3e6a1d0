"""The served model as Ollama lists and shows it: `/api/tags`, `/api/ps`, `/api/show`,
`/api/version`."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from gguf import LlamaFileType

from dflash_local.gguf_file import GgufFile
from dflash_local.model import Model
from dflash_local.server.errors import ApiError
from dflash_local.server.generation import off_loop
from dflash_local.server.models import model_name
from dflash_local.server.ollama_errors import RESPONSES
from dflash_local.server.ollama_schema import ShowRequest

router = APIRouter(responses=RESPONSES)

API_VERSION = "0.12.6"
"""The release of Ollama whose API this is. Clients refuse a server that is too old for them."""

_LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"


@router.get("/api/version")
async def version() -> dict[str, str]:
    """The release of Ollama whose API this is."""
    return {"version": API_VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"models": [await off_loop(_entry, request)]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """The model that is served: it is loaded, and stays so."""
    model: Model = request.app.state.model
    on_gpu = model.target.options.n_gpu_layers != 0
    entry = await off_loop(_entry, request)
    del entry["modified_at"]
    more = {"size_vram": entry["size"] if on_gpu else 0, "context_length": model.n_ctx}
    return {"models": [{**entry, "expires_at": _NEVER, **more}]}


@router.post("/api/show")
async def show(request: Request, body: ShowRequest) -> dict[str, Any]:
    """What the model of that name is. Another one is not found."""
    asked, served = body.model or body.name or "", served_name(request)
    if asked not in (served, served.removesuffix(_LATEST)):
        raise ApiError(
            404, f"model {asked[:256]!r} not found; {served!r} is served here", param="model"
        )
    model: Model = request.app.state.model
    card = await off_loop(_card, model.target.path)
    return {
        "modelfile": f"FROM {model.target.path.name}\n",
        "parameters": "",
        "template": model.target.chat_template or "",
        "modified_at": card.modified_at,
        "details": card.details,
        "model_info": {
            **card.info,
            f"{card.info['general.architecture']}.context_length": model.n_ctx,
        },
        "capabilities": _capabilities(model),
    }


def served_name(request: Request) -> str:
    """The model's name with a tag, as Ollama's always have one."""
    state = request.app.state
    name = model_name(state.model, state.settings)
    return name if ":" in name else name + _LATEST


def _capabilities(model: Model) -> list[str]:
    template = model.target.chat_template or ""
    found = {
        "completion": True,
        "tools": model.dialect.name != "plain",
        "thinking": any(mark in template for mark in ("<think>", "enable_thinking", "<|channel|>")),
        "insert": model.target.vocabulary.infill is not None,
    }
    return [name for name, has in found.items() if has]


@dataclass(frozen=True)
class _Card:
    """What a file says of its model."""

    n_bytes: int
    modified_at: str
    digest: str
    details: dict[str, Any]
    info: dict[str, Any]


@lru_cache(maxsize=8)
def _card(path: Path) -> _Card:
    file = GgufFile.open(path)
    stat = path.stat()
    architecture = file.architecture
    n_parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": _size(n_parameters),
        "quantization_level": _quantization(file),
    }
    # Vocabularies are long, and what else is a list is of no use to a client.
    info = {
        key: value
        for key, value in file.metadata.items()
        if not isinstance(value, list) and key != "tokenizer.chat_template" and _is_json(value)
    }
    modified = datetime.fromtimestamp(stat.st_mtime, timezone.utc)
    # The name of this very file: its bytes would take minutes to hash.
    names = f"{path.name} {file.n_bytes} {stat.st_mtime_ns}"
    return _Card(
        file.n_bytes,
        modified.isoformat(timespec="seconds").replace("+00:00", "Z"),
        hashlib.sha256(names.encode()).hexdigest(),
        details,
        {**info, "general.parameter_count": n_parameters},
    )


def _entry(request: Request) -> dict[str, Any]:
    name = served_name(request)
    card = _card(request.app.state.model.target.path)
    return {
        "name": name,
        "model": name,
        "modified_at": card.modified_at,
        "size": card.n_bytes,
        "digest": card.digest,
        "details": card.details,
    }


def _quantization(file: GgufFile) -> str:
    with suppress(ValueError):
        return LlamaFileType(file.get("general.file_type")).name.removeprefix("MOSTLY_")
    return "unknown"


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _size(n: int) -> str:
    """As Ollama writes it: 7.6B, 494.03M."""
    for unit, divisor, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 2)):
        if n >= divisor:
            return f"{n / divisor:.{digits}f}{unit}"
    return str(n)
