"""From a request to its vectors or scores, pass by pass: who leaves has the next one not begun."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request, Response
from pydantic_core import to_json

from dflash_local.embedder import Embedder, Vector
from dflash_local.errors import PromptTooLongError
from dflash_local.server.answering.api_answer import answered, pool_of
from dflash_local.server.answering.request_check import RequestCheck
from dflash_local.server.http.errors import too_long

MAX_TEXTS = 2048
"""Of a request: OpenAI's limit."""


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


async def respond_embedded(
    request: Request,
    name: str | None,
    body: object,
    use: Literal["embedding", "rerank"],
    prompts: Callable[[Embedder], list[list[int]]],
    answer: Callable[[Embedded], Any],
    keep_alive_s: float | None = None,
) -> Response:
    """The JSON that `answer` makes of the model's results for `prompts`. Both run on the model's
    own threads, and raise ApiError, InputError for requests beyond it."""
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
