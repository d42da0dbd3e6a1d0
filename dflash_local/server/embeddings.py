"""Vectors of texts, and scores of documents, in the forms of OpenAI, llama-server and Ollama:
https://platform.openai.com/docs/api-reference/embeddings,
https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import to_json

from dflash_local.embedder import Embedder, Vector, normalized
from dflash_local.errors import PromptTooLongError
from dflash_local.server.answering import bounds
from dflash_local.server.answering.api_answer import RequestCheck, answered, pool_of
from dflash_local.server.http.errors import OllamaErrorBody, bad_request, error_responses, too_long
from dflash_local.server.ollama.chat import KeepAlive
from dflash_local.server.ollama.model_list import named

router = APIRouter()

_MAX_TEXTS = 2048
"""Of a request: OpenAI's limit."""

_OLLAMA = error_responses(OllamaErrorBody)

_Dimensions = Annotated[int, Field(strict=True, ge=1, le=bounds.MAX_INT)]
_Pieces = Annotated[
    bounds.ListOf[bounds.Text | bounds.TokenId], Field(min_length=1, max_length=4 << 20)
]


class TextPart(BaseModel):
    """A part of a content; a model of vectors reads nothing but text."""

    type: Literal["text"]
    text: bounds.Text


class ContentInput(BaseModel):
    """A text in parts, as messages have it."""

    content: Annotated[bounds.ListOf[TextPart], Field(min_length=1, max_length=_MAX_TEXTS)]


class PromptInput(BaseModel):
    """A text in llama-server's form."""

    prompt_string: bounds.Text


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "pieces"
    if isinstance(value, str):
        return "text"
    return "content" if bounds.field_of(value, "content") is not None else "prompt"


_Input = Annotated[
    Annotated[bounds.Text, Tag("text")]
    | Annotated[_Pieces, Tag("pieces")]
    | Annotated[ContentInput, Tag("content")]
    | Annotated[PromptInput, Tag("prompt")],
    Discriminator(_kind),
]


def _several(given: Any) -> Any:
    """A list that has numbers is one text."""
    if isinstance(given, list) and not any(isinstance(piece, int) for piece in given):
        return given
    return [given]


Inputs = Annotated[
    bounds.ListOf[_Input],
    Field(min_length=1, max_length=_MAX_TEXTS),
    BeforeValidator(_several, json_schema_input_type=_Input | list[_Input]),
]
"""A text, token ids, both in a row, or several of these."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: bounds.Label | None = None


class EmbeddingsRequest(_Request):
    """Texts to make vectors of."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Dimensions | None = Field(
        default=None,
        description="Leave out the numbers of a vector behind these, for models whose first "
        "numbers are a shorter vector.",
    )
    embd_normalize: Annotated[int, Field(strict=True, ge=-1, le=64)] = Field(
        default=2,
        description="Divide a vector by its norm of this order: 2 is the euclidean one, 0 the "
        "largest number over 32760, -1 none.",
    )

    def prompts(self, embedder: Embedder) -> list[list[int]]:
        """Raises ApiError, InputError."""
        _check_dimensions(embedder, self.dimensions)
        return [embedder.tokens(_text(given)) for given in self.input]

    def resized(self, vectors: list[Vector]) -> list[Vector]:
        """`vectors` as the request wants them: cut, and divided by their norm."""
        return list(normalized(np.stack(vectors)[:, : self.dimensions], self.embd_normalize))


class LlamaEmbeddingsRequest(EmbeddingsRequest):
    """`content` is llama-server's other name of `input`."""

    input: Inputs = Field(validation_alias=AliasChoices("input", "content"))


def _text_of(document: Any) -> Any:
    """The text of a document that is an object, as Jina's clients give it."""
    is_object = isinstance(document, dict) and "text" in document
    return document["text"] if is_object else document


_Document = Annotated[bounds.Text, BeforeValidator(_text_of)]
_Documents = Annotated[bounds.ListOf[_Document], Field(min_length=1, max_length=_MAX_TEXTS)]


class RerankRequest(_Request):
    """Documents to put into order. With `texts` in place of `documents` the answer has the form of
    Text Embeddings Inference."""

    query: bounds.Text
    documents: _Documents | None = None
    texts: _Documents | None = None
    top_n: _Dimensions | None = None
    return_text: bounds.Flag | None = None
    return_documents: bounds.Flag | None = None

    @model_validator(mode="after")
    def _has_documents(self) -> RerankRequest:
        if not self.given:
            raise ValueError("documents is missing, a list of texts")
        return self

    @property
    def given(self) -> list[str]:
        """The texts to be put into order."""
        return self.documents or self.texts or []


class _OllamaRequest(_Request):
    """Fields of both. A text that is too long loses its end, unless `truncate` is off."""

    truncate: bounds.Flag | None = None
    keep_alive: KeepAlive | None = None


class EmbedRequest(_OllamaRequest):
    """Texts to make vectors of."""

    input: bounds.TextOr[Annotated[bounds.ListOf[bounds.Text], Field(max_length=_MAX_TEXTS)]]
    dimensions: _Dimensions | None = None


class OldEmbedRequest(_OllamaRequest):
    """A text to make a vector of."""

    prompt: bounds.Text


@dataclass(frozen=True)
class Embedded:
    """The results of `model` for each text of a request: a vector, several, or a score."""

    model: str
    vectors: list[Vector]
    n_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """In OpenAI's form."""
        return {"prompt_tokens": self.n_tokens, "total_tokens": self.n_tokens}


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """A vector for each text, by an embedding model."""

    def prompts(embedder: Embedder) -> list[list[int]]:
        _check_pooled(embedder)
        return body.prompts(embedder)

    def answer(found: Embedded) -> dict[str, Any]:
        def shown(vector: Vector) -> Any:
            if body.encoding_format == "base64":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return vector.tolist()

        data = [
            {"object": "embedding", "index": index, "embedding": shown(vector)}
            for index, vector in enumerate(body.resized(found.vectors))
        ]
        return {"object": "list", "data": data, "model": found.model, "usage": found.usage}

    return await _respond(request, body.model, body, prompts, answer)


@router.post("/embeddings")
@router.post("/embedding", include_in_schema=False)
async def llama_embeddings(request: Request, body: LlamaEmbeddingsRequest) -> Response:
    """A vector for each text, or with pooling "none" one for each token of it."""

    def answer(found: Embedded) -> list[dict[str, Any]]:
        of_tokens = found.vectors[0].ndim == 2
        shown = found.vectors if of_tokens else [v[None] for v in body.resized(found.vectors)]
        return [{"index": i, "embedding": rows.tolist()} for i, rows in enumerate(shown)]

    return await _respond(request, body.model, body, body.prompts, answer)


@router.post("/v1/rerank")
@router.post("/rerank", include_in_schema=False)
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
async def rerank(request: Request, body: RerankRequest) -> Response:
    """The documents with the best first, each with its score: how well it answers the query."""

    def prompts(embedder: Embedder) -> list[list[int]]:
        return [embedder.pair_tokens(body.query, document) for document in body.given]

    def answer(found: Embedded) -> Any:
        scored = [(float(vector[0]), index) for index, vector in enumerate(found.vectors)]
        best = sorted(scored, key=lambda each: -each[0])[: body.top_n]
        if body.texts is not None:
            return [
                {"index": i, "score": score} | ({"text": body.given[i]} if body.return_text else {})
                for score, i in best
            ]
        results = [
            {"index": i, "relevance_score": score}
            | ({"document": {"text": body.given[i]}} if body.return_documents else {})
            for score, i in best
        ]
        return {"model": found.model, "object": "list", "usage": found.usage, "results": results}

    return await _respond(request, body.model, body, prompts, answer, use="rerank")


@router.post("/api/embed", responses=_OLLAMA)
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

    return await _ollama(request, body, texts, answer, body.dimensions)


@router.post("/api/embeddings", responses=_OLLAMA)
async def old_embed(request: Request, body: OldEmbedRequest) -> Response:
    """A vector of one text, as the model makes it."""
    return await _ollama(
        request, body, [body.prompt], lambda found: {"embedding": found.vectors[0].tolist()}
    )


async def _ollama(
    request: Request,
    body: _OllamaRequest,
    texts: Sequence[str],
    answer: Callable[[Embedded], Any],
    dimensions: int | None = None,
) -> Response:
    def prompts(embedder: Embedder) -> list[list[int]]:
        _check_pooled(embedder)
        _check_dimensions(embedder, dimensions)
        return [embedder.tokens(text, truncate=body.truncate is not False) for text in texts]

    name = named(request, body.model)
    return await _respond(request, name, body, prompts, answer, body.keep_alive)


async def _respond(
    request: Request,
    name: str | None,
    body: BaseModel,
    prompts: Callable[[Embedder], list[list[int]]],
    answer: Callable[[Embedded], Any],
    keep_alive_s: float | None = None,
    use: Literal["embedding", "rerank"] = "embedding",
) -> Response:
    """The JSON that `answer` makes of the model's results for `prompts`, pass by pass: who leaves
    has the next one not begun. Both run on the model's own threads, and raise ApiError, InputError
    for requests beyond it."""
    pool = pool_of(request)
    check: RequestCheck = request.app.state.request_check
    check.check(pool, name, body, use)

    def shown(embedded: Embedded) -> Response:
        return Response(to_json(answer(embedded)), media_type="application/json")

    async def whole() -> Response:
        with pool.claim(name, keep_alive_s, use) as claim:
            loaded = await claim.loaded(Embedder)
            embedder, run = loaded.model, loaded.threads.run
            try:
                given = await run(prompts, embedder)
            except PromptTooLongError as error:
                # A server that is started in another way would not take it, either.
                raise too_long(error, str(error), "input") from None
            vectors: list[Vector] = []
            for batch in embedder.batches(given):
                vectors += await run(embedder.run, batch)
            return await run(shown, Embedded(loaded.name, vectors, sum(map(len, given))))

    return await answered(request, whole())


def _text(given: str | list[str | int] | ContentInput | PromptInput) -> str | list[str | int]:
    """An input as models take it."""
    if isinstance(given, PromptInput):
        return given.prompt_string
    if isinstance(given, ContentInput):
        return "".join(part.text for part in given.content)
    return given


def _check_pooled(embedder: Embedder) -> None:
    """Raises ApiError for a model that gives a text several vectors."""
    if embedder.pooling == "none":
        raise bad_request(
            "this model is used with pooling none, which gives a vector for each token: ask "
            "/embeddings, or start the server with another --pooling"
        )


def _check_dimensions(embedder: Embedder, wanted: int | None) -> None:
    """Raises ApiError for more than the model has."""
    if wanted is not None and wanted > embedder.dimensions:
        raise bad_request(
            f"dimensions is {wanted}; this model's vectors have {embedder.dimensions}",
            param="dimensions",
        )
