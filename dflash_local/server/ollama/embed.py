"""`/api/embed`, and its older form, `/api/embeddings`:
https://github.com/ollama/ollama/blob/main/docs/api.md."""

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dflash_local.embedder import Embedder, normalized
from dflash_local.server.answering import bounds
from dflash_local.server.answering.embedding import MAX_TEXTS, Embedded, respond_embedded
from dflash_local.server.ollama.errors import RESPONSES
from dflash_local.server.ollama.model_list import named
from dflash_local.server.ollama.schema import KeepAlive
from dflash_local.server.openai.embeddings import check_dimensions, check_pooled

router = APIRouter(responses=RESPONSES)


class _EmbedRequest(BaseModel):
    """Fields of both. A text that is too long loses its end, unless `truncate` is off."""

    model_config = ConfigDict(extra="allow")

    model: bounds.Label | None = None
    truncate: bounds.Flag | None = None
    keep_alive: KeepAlive | None = None


class EmbedRequest(_EmbedRequest):
    """Texts to make vectors of."""

    input: bounds.TextOr[Annotated[bounds.ListOf[bounds.Text], Field(max_length=MAX_TEXTS)]]
    dimensions: Annotated[int, Field(strict=True, ge=1, le=bounds.MAX_INT)] | None = None


class OldEmbedRequest(_EmbedRequest):
    """A text to make a vector of."""

    prompt: bounds.Text


@router.post("/api/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """A vector of length 1 for each text."""
    begin = time.perf_counter_ns()
    texts = [body.input] if isinstance(body.input, str) else body.input

    def answer(found: Embedded) -> dict[str, Any]:
        vectors = [vector[: body.dimensions] for vector in found.vectors]
        return {
            "model": body.model or found.model,
            "embeddings": normalized(np.stack(vectors)).tolist() if vectors else [],
            "total_duration": time.perf_counter_ns() - begin,
            "load_duration": 0,
            "prompt_eval_count": found.n_tokens,
        }

    return await _respond(request, body, texts, answer, body.dimensions)


@router.post("/api/embeddings")
async def old_embed(request: Request, body: OldEmbedRequest) -> Response:
    """A vector of one text, as the model makes it."""
    return await _respond(
        request, body, [body.prompt], lambda found: {"embedding": found.vectors[0].tolist()}
    )


async def _respond(
    request: Request,
    body: _EmbedRequest,
    texts: Sequence[str],
    answer: Callable[[Embedded], Any],
    dimensions: int | None = None,
) -> Response:
    def prompts(embedder: Embedder) -> list[list[int]]:
        check_pooled(embedder)
        check_dimensions(embedder, dimensions)
        return [embedder.tokens(text, truncate=body.truncate is not False) for text in texts]

    name = named(request, body.model)
    return await respond_embedded(
        request, name, body, "embedding", prompts, answer, body.keep_alive
    )
