"""The served models as Ollama lists and shows them: `/api/tags`, `/api/ps`, `/api/show`,
`/api/version`; and `/api/pull` and `/api/delete`:
https://github.com/ollama/ollama/blob/main/docs/api.md."""

import hashlib
import math
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from dflash_local.chat.families import dialect_of
from dflash_local.errors import FileError
from dflash_local.gguf.file import GgufFile
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import answered, library_of, pool_of
from dflash_local.server.answering.sampling_fields import usual_sampling
from dflash_local.server.http.errors import ApiError, OllamaErrorBody, error_responses
from dflash_local.server.http.event_stream import LINES, AnswerStream
from dflash_local.server.models.served_model import LoadFailure, ServedModel
from dflash_local.server.models.source import ModelSource

router = APIRouter(responses=error_responses(OllamaErrorBody))

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is. Clients refuse servers that are too old for them."""

EXACT_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"
_LONGEST_S = 1e9  # longer is never: dates end with the year 9999
_MIDDLE_KEYS = ("tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id")
_MIDDLES = frozenset(
    (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
        "<｜fim▁end｜>",  # noqa: RUF001  (DeepSeek's)
    )
)
"""Names by which llama.cpp's `src/llama-vocab.cpp` knows the token after which a gap is filled."""


class ShowRequest(BaseModel):
    """A model by its name. `name` is the old name of `model`."""

    model: bounds.Label | None = None
    name: bounds.Label | None = None


class PullRequest(ShowRequest):
    """A model to fetch. The answer is a stream unless `stream` is false."""

    stream: bounds.Flag | None = None


@router.get("/api/version")
async def version() -> dict[str, str]:
    """The release of Ollama whose API this is."""
    return {"version": API_VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The models that are served, loaded or not."""
    served_models = list(pool_of(request).models.values())
    return {"models": [await run_in_threadpool(_entry, served) for served in served_models]}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """The models that are loaded, and until when they stay loaded."""
    entries = []
    for served in list(pool_of(request).models.values()):
        if (model := served.model) is not None:
            entry = await run_in_threadpool(_entry, served)
            del entry["modified_at"]
            on_gpu = model.plan is not None and model.plan.n_gpu_layers != 0
            entry["expires_at"] = _expires_at(served)
            entry["size_vram"] = entry["size"] if on_gpu else 0
            entry["context_length"] = model.n_ctx
            entries.append(entry)
    return {"models": entries}


@router.post("/api/show")
async def show(request: Request, body: ShowRequest) -> dict[str, Any]:
    """Details of the model of that name, loaded or not."""
    pool = pool_of(request)
    served = pool.named(untagged(request, body.model or body.name) or "")
    card = await run_in_threadpool(_card_of, served.source)
    architecture = card.details["family"]
    info = dict(card.info)
    parameters: dict[str, Any] = {}
    if served.model is not None:
        info[f"{architecture}.context_length"] = served.model.n_ctx
        parameters = {"num_ctx": served.model.n_ctx}
    if served.writer is not None:
        parameters |= usual_sampling(served.writer)
    sees = served.writer is not None and served.writer.projector is not None
    capabilities = [*card.capabilities, *(["vision"] if sees else [])]
    return {
        "license": str(info.get("general.license", "")),
        "modelfile": f"FROM {served.source.target.name}\n",
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters.items()),
        "template": card.template,
        "modified_at": card.modified_at,
        "details": card.details,
        "model_info": info,
        "capabilities": capabilities if served.source.use == "chat" else ["embedding"],
    }


def tagged(name: str) -> str:
    """A model's name with a tag, which Ollama's names always have."""
    return name if ":" in name else name + _LATEST


def untagged(request: Request, name: str | None) -> str | None:
    """The server's name of the model that an Ollama client calls `name`."""
    known = pool_of(request).models
    return name if name is None or name in known else name.removesuffix(_LATEST)


def named(request: Request, name: str | None) -> str | None:
    """As `untagged`, but raises ApiError for a model that is not here: Ollama's clients then offer
    to pull it."""
    name = untagged(request, name)
    return pool_of(request).named(name).name if name else None


def _expires_at(served: ServedModel) -> str:
    left = served.expires_in_s
    if left > _LONGEST_S:
        return _NEVER
    return f"{datetime.now(timezone.utc) + timedelta(seconds=left):{EXACT_TIME}}"


@dataclass(frozen=True)
class _ModelCard:
    n_bytes: int
    modified_at: str
    digest: str
    details: dict[str, Any]
    info: dict[str, Any]
    template: str
    capabilities: list[str]


def _details(family: str, size: str, quantization: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": size,
        "quantization_level": quantization,
    }


_UNREADABLE = _ModelCard(0, "1970-01-01T00:00:00Z", "", _details("", "", "unknown"), {}, "", [])
"""Of a file that cannot be read: it is listed, and requests for it are told why it fails."""


def _card_of(source: ModelSource) -> _ModelCard:
    """Raises ApiError for a file that cannot be read."""
    try:
        stat = source.target.stat()
        return _card(source.target, stat.st_size, stat.st_mtime_ns)
    except (FileError, OSError) as error:
        raise LoadFailure.of(error, source).api_error(source.name) from None


@lru_cache(maxsize=64)
def _card(path: Path, n_bytes: int, time_ns: int) -> _ModelCard:
    """Kept for this size and time: with others it is another file."""
    file = GgufFile.open(path)
    architecture = file.architecture
    template = str(file.metadata.get("tokenizer.chat_template") or "")
    n_parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    details = _details(architecture, _size(n_parameters), file.quantization or "unknown")
    # Lists are left out: vocabularies are long, and clients have no use for the others.
    info = {
        key: value
        for key, value in file.metadata.items()
        if not isinstance(value, list)
        and key != "tokenizer.chat_template"
        and (not isinstance(value, float) or math.isfinite(value))
    }
    modified = datetime.fromtimestamp(time_ns / 1e9, timezone.utc)
    # It stands for this file; hashing its content would take minutes.
    names = f"{path.name} {n_bytes} {time_ns}"
    return _ModelCard(
        file.n_bytes,
        f"{modified:%Y-%m-%dT%H:%M:%SZ}",
        hashlib.sha256(names.encode()).hexdigest(),
        details,
        {**info, "general.parameter_count": n_parameters},
        template,
        _capabilities(file, template),
    )


def _capabilities(file: GgufFile, template: str) -> list[str]:
    found = {
        "completion": True,
        "tools": dialect_of(template).form is not None,
        "thinking": any(mark in template for mark in ("<think>", "enable_thinking", "<|channel|>")),
        # As llama.cpp finds out: from the file's keys, or from the names of its tokens.
        "insert": any(key in file.metadata for key in _MIDDLE_KEYS)
        or not _MIDDLES.isdisjoint(file.metadata.get("tokenizer.ggml.tokens") or ()),
    }
    return [name for name, has in found.items() if has]


def _entry(served: ServedModel) -> dict[str, Any]:
    name = tagged(served.name)
    try:
        card = _card_of(served.source)
    except ApiError:
        card = _UNREADABLE
    return {
        "name": name,
        "model": name,
        "modified_at": card.modified_at,
        "size": card.n_bytes,
        "digest": card.digest,
        "details": card.details,
    }


def _size(n: int) -> str:
    """As Ollama writes it: 7.6B, 494.03M."""
    for unit, divisor, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 2)):
        if n >= divisor:
            return f"{n / divisor:.{digits}f}{unit}"
    return str(n)


@router.post("/api/pull")
async def pull(request: Request, body: PullRequest) -> Response:
    """Fetch a model by its name, as `dflash-local pull` does, and serve it. Leaving ends the
    transfer; the next request goes on with it."""
    events = library_of(request).fetch(_name(request, body))
    if body.stream is not False:
        return AnswerStream(events, LINES)

    async def whole() -> Response:
        async with aclosing(events):
            async for event in events:
                last = event
        return JSONResponse(last)

    return await answered(request, whole())


@router.delete("/api/delete")
async def delete(request: Request, body: ShowRequest) -> dict[str, Any]:
    """Remove a model from this disk, unless it is in use or the server was started with it."""
    return {"freed": await library_of(request).remove(_name(request, body))}


def _name(request: Request, body: ShowRequest) -> str:
    return untagged(request, body.model or body.name) or ""
