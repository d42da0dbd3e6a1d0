"""From a request to its answer, by the model that it names: loaded if it is not, and held until the
answer ends.

Every API makes an `ApiAnswer` of a request; this is where the request gets its model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from fastapi import Request, Response

from dflash_local.server.http.event_stream import AnswerStream, Comment, StreamForm, unless_gone
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.served_model import LoadedModel

CLIENT_LEFT = 499
"""nginx's status for a client that has left. Only the log shows it."""


class ApiAnswer(Protocol):
    """The answer to a request, as a stream or in one piece."""

    def events(self) -> AsyncIterator[Any]: ...

    async def whole(self) -> Response: ...


Begin = Callable[[LoadedModel], Awaitable[ApiAnswer]]
"""Reads a request for a model. Raises ApiError, InputError for what that model cannot do."""


def pool_of(request: Request) -> ModelPool:
    """The models of the application that got `request`."""
    pool: ModelPool = request.app.state.pool
    return pool


async def respond(
    request: Request,
    name: str | None,
    begin: Begin,
    form: StreamForm | None = None,
    keep_alive_s: float | None = None,
) -> Response:
    """The answer of the model of that name: a stream in `form`, or without one a whole.

    While the model is loaded, the comments of a stream tell how far that is.
    """
    pool = pool_of(request)
    pool.find(name)  # raises ApiError for an unknown name before a stream begins
    if form is not None:
        return AnswerStream(_events(pool, name, begin, keep_alive_s), form)
    response = await unless_gone(_whole(pool, name, begin, keep_alive_s), request.receive)
    return response or Response(status_code=CLIENT_LEFT)


async def _events(
    pool: ModelPool, name: str | None, begin: Begin, keep_alive_s: float | None
) -> AsyncIterator[Any]:
    with pool.claim(name, keep_alive_s) as claim:
        async for line in claim.progress():
            yield Comment(line)
        answer = await begin(await claim.loaded())
        async for event in answer.events():
            yield event


async def _whole(
    pool: ModelPool, name: str | None, begin: Begin, keep_alive_s: float | None
) -> Response:
    async with pool.use(name, keep_alive_s) as loaded:
        answer = await begin(loaded)
        return await answer.whole()
