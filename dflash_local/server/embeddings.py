"""Embeddings, which this server does not make: it says so in the form of each API, and what to do.

A target's context here drafts and verifies. A second one for embeddings would take memory that no
plan knows of, and what a chat model's hidden states make is far from what an embedding model gives.
"""

from __future__ import annotations

from fastapi import APIRouter

from dflash_local.server.http.errors import ApiError

router = APIRouter(include_in_schema=False)


@router.post("/v1/embeddings")
@router.post("/embeddings")
@router.post("/embedding")
@router.post("/api/embed")
@router.post("/api/embeddings")
async def embeddings() -> None:
    """Refused, whatever is asked."""
    raise ApiError(
        501,
        "this server makes no embeddings, as it serves chat models to draft for; serve an "
        "embedding model beside it, such as nomic-embed-text or bge-m3, with 'llama-server -m "
        "MODEL.gguf --embeddings --port 8081', and give its address to your program for embeddings",
        type="not_supported_error",
        code="embeddings_not_supported",
        headers={"X-Should-Retry": "false"},  # OpenAI's clients would try again
    )
