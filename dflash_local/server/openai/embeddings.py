"""`/v1/embeddings`: a vector for each text."""

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from dflash_local.embedder import Embedder, Vector, normalized
from dflash_local.server.answering.embedding import Embedded, respond_embedded
from dflash_local.server.http.errors import bad_request
from dflash_local.server.openai.embeddings_schema import EmbeddingsRequest

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
