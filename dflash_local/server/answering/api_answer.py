"""From a request to its answer, by the model that it names: loaded if it is not, and held until the
answer ends.

Every API makes an `ApiAnswer` of a request; this is where the request gets its model.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from dflash_local.model import Model
from dflash_local.server.answering.request_check import RequestCheck
from dflash_local.server.http.event_stream import AnswerStream, Comment, StreamForm, unless_gone
from dflash_local.server.models.library import Library
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.served_model import LoadedModel

CLIENT_LEFT = 499
"""nginx's status for a client that has left. Only the log shows it."""


class ApiAnswer(Protocol):
    """The answer to a request: a stream of events and, once it has ended, one piece."""

    def events(self) -> AsyncIterator[Any]: ...

    def whole(self) -> Any:
        """The JSON of the complete answer. With log-probabilities it is long, and takes a while to
        write."""


Body = TypeVar("Body")
Prepared = TypeVar("Prepared")


def pool_of(request: Request) -> ModelPool:
    """The models of the application that got `request`."""
    pool: ModelPool = request.app.state.pool
    return pool


def library_of(request: Request) -> Library:
    """The models that the application that got `request` could serve, too."""
    library: Library = request.app.state.library
    return library


async def on_model(
    request: Request, name: str | None, body: Body, work: Callable[[Model, Body], Prepared]
) -> Prepared:
    """Call `work` on `body` with the model of that name, on a thread of that model's."""
    async with pool_of(request).use(name) as loaded:
        return await loaded.threads.run(work, loaded.model, body)


async def respond(
    request: Request,
    name: str | None,
    body: Body,
    prepare: Callable[[Model, Body], Prepared],
    answer: Callable[[LoadedModel, Body, Prepared], ApiAnswer],
    form: StreamForm | None = None,
    keep_alive_s: float | None = None,
) -> Response:
    """The answer of the model of that name: a stream in `form`, or without one a whole.

    `answer` answers `body` with the result of `prepare`, on a thread of the model's. Both raise
    ApiError, InputError for requests beyond that model. While the model is loaded, the comments of
    a stream tell its progress.
    """
    pool = pool_of(request)
    # Raises ApiError before a stream begins.
    check: RequestCheck = request.app.state.request_check
    check.check(pool, name, body)

    async def begin(loaded: LoadedModel) -> ApiAnswer:
        prepared = await loaded.threads.run(prepare, loaded.model, body)
        if warning := getattr(prepared, "warning", None):
            check.tell_once(f"{loaded.name}: {warning}")
        return answer(loaded, body, prepared)

    async def events() -> AsyncGenerator[Any, None]:
        with pool.claim(name, keep_alive_s) as claim:
            async for line in claim.progress():
                yield Comment(line)
            begun = await begin(await claim.loaded(Model))
            async for event in begun.events():
                yield event

    async def whole() -> Response:
        async with pool.use(name, keep_alive_s) as loaded:
            begun = await begin(loaded)
            async for _ in begun.events():
                pass
            return await run_in_threadpool(lambda: JSONResponse(begun.whole()))

    if form is not None:
        return AnswerStream(events(), form)
    return await answered(request, whole())


async def answered(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes. Once the client has left, it is cancelled."""
    return await unless_gone(work, request.receive) or Response(status_code=CLIENT_LEFT)
