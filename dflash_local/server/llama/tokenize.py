"""`/tokenize`, `/detokenize`: llama-server's, by which clients count tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from dflash_local.server.answering.api_answer import pool_of
from dflash_local.server.answering.generation import off_loop
from dflash_local.server.http.errors import ApiError
from dflash_local.server.llama.completion import mixed_tokens
from dflash_local.server.llama.schema import DetokenizeRequest, TokenizeRequest
from dflash_local.target.vocabulary import Vocabulary

router = APIRouter()

_MOST_PIECES = 100_000


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text, if asked for with their texts: bytes where one is no text by itself."""
    async with pool_of(request).use(body.model) as served:
        return {"tokens": await off_loop(_tokens, served.model.target.vocabulary, body)}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, control tokens by their names."""
    async with pool_of(request).use(body.model) as served:
        vocabulary = served.model.target.vocabulary
        return {"content": await off_loop(vocabulary.detokenize, body.tokens, special=True)}


def _tokens(vocabulary: Vocabulary, body: TokenizeRequest) -> list[Any]:
    tokens = mixed_tokens(
        vocabulary,
        [body.content] if isinstance(body.content, str) else body.content,
        special=body.parse_special,
        add_special=body.add_special,
    )
    if not body.with_pieces:
        return tokens
    if len(tokens) > _MOST_PIECES:
        raise ApiError(
            400,
            f"the text has {len(tokens)} tokens; with_pieces takes at most {_MOST_PIECES}",
            param="with_pieces",
        )
    return [{"id": t, "piece": _piece(vocabulary, t)} for t in tokens]


def _piece(vocabulary: Vocabulary, token: int) -> str | list[int]:
    piece = vocabulary.piece(token, special=True)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
