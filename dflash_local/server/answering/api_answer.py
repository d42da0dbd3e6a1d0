"""From a request to its answer, by the model that it names: loaded for it, and held until its end.

Every API makes an `Answer` of a request, and this is where it meets its model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from fastapi import Request, Response

from dflash_local.server.answering.generation import unless_gone
from dflash_local.server.http.event_stream import Comment, Stream, StreamForm
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.served import Served


class Answer(Protocol):
    """What a request is answered, as a stream or in one piece."""

    def events(self) -> AsyncIterator[Any]: ...

    async def whole(self) -> Response: ...


Begin = Callable[[Served], Awaitable[Answer]]
"""Reads a request for a model. Raises ApiError, InputError for what that model cannot do."""


def pool_of(request: Request) -> ModelPool:
    """The models of the application that `request` is to."""
    pool: ModelPool = request.app.state.pool
    return pool


async def answer(
    request: Request,
    name: str | None,
    begin: Begin,
    form: StreamForm | None = None,
    keep_alive_s: float | None = None,
) -> Response:
    """The answer of the model of that name, a stream of `form` or, without one, one piece.

    While the model is loaded a stream tells how far that is, where its form can.
    """
    pool = pool_of(request)
    pool.find(name)
    if form is not None:
        return Stream(_events(pool, name, begin, keep_alive_s), form)
    return await unless_gone(request, _whole(pool, name, begin, keep_alive_s))


async def _events(
    pool: ModelPool, name: str | None, begin: Begin, keep_alive_s: float | None
) -> AsyncIterator[Any]:
    with pool.claim(name, keep_alive_s) as claim:
        async for line in claim.progress():
            yield Comment(line)
        answered = await begin(await claim.served())
        async for event in answered.events():
            yield event


async def _whole(
    pool: ModelPool, name: str | None, begin: Begin, keep_alive_s: float | None
) -> Response:
    async with pool.use(name, keep_alive_s) as served:
        answered = await begin(served)
        return await answered.whole()
