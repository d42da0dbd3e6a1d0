"""`/v1/embeddings`, a vector for each text, with llama-server's further fields:
https://platform.openai.com/docs/api-reference/embeddings."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from dflash_local.embedder import Embedder, Vector, normalized
from dflash_local.server.answering import bounds
from dflash_local.server.answering.embedding import MAX_TEXTS, Embedded, respond_embedded
from dflash_local.server.http.errors import bad_request

_Pieces = Annotated[
    bounds.ListOf[bounds.Text | bounds.TokenId], Field(min_length=1, max_length=4 << 20)
]


class TextPart(BaseModel):
    """A part of a content; a model of vectors reads nothing but text."""

    type: Literal["text"]
    text: bounds.Text


class ContentInput(BaseModel):
    """A text in parts, as messages have it."""

    content: Annotated[bounds.ListOf[TextPart], Field(min_length=1, max_length=MAX_TEXTS)]


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
    Field(min_length=1, max_length=MAX_TEXTS),
    BeforeValidator(_several, json_schema_input_type=_Input | list[_Input]),
]
"""A text, token ids, both in a row, or several of these."""


class EmbeddingsRequest(BaseModel):
    """Texts to make vectors of."""

    model_config = ConfigDict(extra="allow")

    model: bounds.Label | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(strict=True, ge=1, le=bounds.MAX_INT)] | None = Field(
        default=None,
        description="Leave out the numbers of a vector behind these, for models whose first "
        "numbers are a shorter vector.",
    )
    embd_normalize: Annotated[int, Field(strict=True, ge=-1, le=64)] = Field(
        default=2,
        description="Divide a vector by its norm of this order: 2 is the euclidean one, 0 the "
        "largest number over 32760, -1 none.",
    )

    @property
    def texts(self) -> list[str | Sequence[str | int]]:
        """The inputs as models take them."""
        return [_text(given) for given in self.input]


def _text(given: str | list[str | int] | ContentInput | PromptInput) -> str | list[str | int]:
    if isinstance(given, PromptInput):
        return given.prompt_string
    if isinstance(given, ContentInput):
        return "".join(part.text for part in given.content)
    return given


router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """A vector for each text, by an embedding model."""

    def prompts(embedder: Embedder) -> list[list[int]]:
        check_pooled(embedder)
        return input_tokens(embedder, body)

    def answer(found: Embedded) -> dict[str, Any]:
        def shown(vector: Vector) -> Any:
            if body.encoding_format == "base64":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return vector.tolist()

        data = [
            {"object": "embedding", "index": index, "embedding": shown(vector)}
            for index, vector in enumerate(resized(found.vectors, body))
        ]
        return {"object": "list", "data": data, "model": found.model, "usage": found.usage}

    return await respond_embedded(request, body.model, body, "embedding", prompts, answer)


def input_tokens(embedder: Embedder, body: EmbeddingsRequest) -> list[list[int]]:
    """The prompts of a request. Raises ApiError, InputError."""
    check_dimensions(embedder, body.dimensions)
    return [embedder.tokens(text) for text in body.texts]


def check_pooled(embedder: Embedder) -> None:
    """Raises ApiError for a model that gives a text several vectors."""
    if embedder.pooling == "none":
        raise bad_request(
            "this model is used with pooling none, which gives a vector for each token: ask "
            "/embeddings, or start the server with another --pooling"
        )


def check_dimensions(embedder: Embedder, wanted: int | None) -> None:
    """Raises ApiError for more than the model has."""
    if wanted is not None and wanted > embedder.dimensions:
        raise bad_request(
            f"dimensions is {wanted}; this model's vectors have {embedder.dimensions}",
            param="dimensions",
        )


def resized(vectors: list[Vector], body: EmbeddingsRequest) -> list[Vector]:
    """`vectors` as the request wants them: cut, and divided by their norm."""
    return list(normalized(np.stack(vectors)[:, : body.dimensions], body.embd_normalize))
