"""`/completion`: llama-server's own completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from dflash_local.model import Model
from dflash_local.server.answering.api_answer import answer
from dflash_local.server.answering.generation import choices, off_loop
from dflash_local.server.llama.answers import EVENTS, LlamaAnswers, llama_options
from dflash_local.server.llama.schema import CompletionRequest
from dflash_local.server.models.served import Served
from dflash_local.target.vocabulary import Vocabulary

router = APIRouter()


@router.post("/completion")
@router.post("/completions", include_in_schema=False)
async def completion(request: Request, body: CompletionRequest) -> Response:
    """Go on with each prompt. `tokens_cached` are those of it that needed no computing."""
    options = llama_options(body)

    async def begin(served: Served) -> LlamaAnswers:
        prompts = await off_loop(_token_ids, served.model, body.prompts)
        tasks = [task for prompt in prompts for task in choices(prompt, options, body.n_cmpl)]
        return LlamaAnswers(served, body, tasks)

    return await answer(request, body.model, begin, EVENTS if body.stream else None)


def _token_ids(model: Model, prompts: Sequence[str | Sequence[str | int]]) -> list[list[int]]:
    return [
        mixed_tokens(model.target.vocabulary, [p] if isinstance(p, str) else p, n_ctx=model.n_ctx)
        for p in prompts
    ]


def mixed_tokens(
    vocabulary: Vocabulary,
    pieces: Sequence[str | int],
    *,
    special: bool = True,
    add_special: bool = True,
    n_ctx: int | None = None,
) -> list[int]:
    """Token ids of texts and ids after one another; a text in front begins as the model wants.

    Raises what `Vocabulary.tokenize` raises.
    """
    tokens: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            tokens.append(piece)
        else:
            first = add_special and not index
            tokens += vocabulary.tokenize(piece, special=special, add_special=first, n_ctx=n_ctx)
    return tokens
