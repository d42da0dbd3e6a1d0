"""`/embeddings` in llama-server's form, and `/rerank`, which scores documents for a query."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dflash_local.embedder import Embedder
from dflash_local.server.answering import bounds
from dflash_local.server.answering.embedding import MAX_TEXTS, Embedded, respond_embedded
from dflash_local.server.openai.embeddings import (
    EmbeddingsRequest,
    Inputs,
    input_tokens,
    resized,
)

router = APIRouter()


class LlamaEmbeddingsRequest(EmbeddingsRequest):
    """`content` is llama-server's other name of `input`."""

    input: Inputs = Field(validation_alias=AliasChoices("input", "content"))


def _text_of(document: Any) -> Any:
    """The text of a document that is an object, as Jina's clients give it."""
    is_object = isinstance(document, dict) and "text" in document
    return document["text"] if is_object else document


_Document = Annotated[bounds.Text, BeforeValidator(_text_of)]
_Documents = Annotated[bounds.ListOf[_Document], Field(min_length=1, max_length=MAX_TEXTS)]


class RerankRequest(BaseModel):
    """Documents to put into order. With `texts` in place of `documents` the answer has the form of
    Text Embeddings Inference."""

    model_config = ConfigDict(extra="allow")

    model: bounds.Label | None = None
    query: bounds.Text
    documents: _Documents | None = None
    texts: _Documents | None = None
    top_n: Annotated[int, Field(strict=True, ge=1, le=bounds.MAX_INT)] | None = None
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


@router.post("/embeddings")
@router.post("/embedding", include_in_schema=False)
async def embeddings(request: Request, body: LlamaEmbeddingsRequest) -> Response:
    """A vector for each text, or with pooling "none" one for each token of it."""

    def prompts(embedder: Embedder) -> list[list[int]]:
        return input_tokens(embedder, body)

    def answer(found: Embedded) -> list[dict[str, Any]]:
        of_tokens = found.vectors[0].ndim == 2
        shown = found.vectors if of_tokens else [v[None] for v in resized(found.vectors, body)]
        return [{"index": i, "embedding": rows.tolist()} for i, rows in enumerate(shown)]

    return await respond_embedded(request, body.model, body, "embedding", prompts, answer)


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

    return await respond_embedded(request, body.model, body, "rerank", prompts, answer)
