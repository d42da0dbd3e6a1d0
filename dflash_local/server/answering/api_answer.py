"""From a request to its answer, by the model that it names: loaded if it is not, and held until the
answer ends.

Every API makes an `ApiAnswer` of a request; this is where the request gets its model, and where
names in it that this server does not know are told in the log once, or refused.
"""

import difflib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from dflash_local.model import Model
from dflash_local.server.http.errors import bad_request
from dflash_local.server.http.event_stream import AnswerStream, Comment, StreamForm, unless_gone
from dflash_local.server.models.library import Library
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.served_model import LoadedModel
from dflash_local.server.models.source import Use

log = logging.getLogger("dflash_local.server")

_NAME = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,80}")
"""Texts that are logged as a name: no piece of a prompt that was put in a wrong place."""
_MOST = 100
"""Lines that are remembered: a client may send ever new names."""
_FOR_OTHERS = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "modalities", "prediction", "audio", "verbosity", "caption"),
        *("include", "truncation", "background", "text", "conversation", "prompt_cache_options"),
        *("web_search_options", "client_metadata", "context_management", "betas", "mcp_servers"),
        *("container", "output_config", "thinking", "inference_geo", "options"),
        *("samplers", "cache_reuse", "slot_id", "n_indent", "image_data"),
        *("return_tokens", "parse_tool_calls", "thinking_forced_open"),
        *("t_max_prompt_ms", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
)
"""Fields of other servers and for their keeping of accounts, which clients send to any server."""


class RequestCheck:
    """With `strict`, such requests are refused."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._told: set[str] = set()

    def check(self, pool: ModelPool, name: str | None, body: object, use: Use = "chat") -> None:
        """Raises ApiError for a model that is not here, and with `strict` for one that a server of
        one model would answer for, and for unknown fields."""
        served = pool.find(name, use)
        if name and name != served.name and name not in served.source.aliases:
            if self.strict:
                pool.named(name)
            self._tell(name, f"a request names the model {name}; {served.name} answers it")
        for field in sorted(_unknown(body)):
            if self.strict:
                raise bad_request(
                    f"{field[:60]!r} is no field here{_hint(field, body)}", param=field[:60]
                )
            self._tell(field, f"a request has the unknown field {field}{_hint(field, body)}")

    def tell_once(self, line: str) -> None:
        """Log a line, the first time."""
        if line not in self._told:
            self._told.add(line)
            log.warning("warning: %s", line)

    def _tell(self, name: str, line: str) -> None:
        if _NAME.fullmatch(name) and len(self._told) < _MOST:
            self.tell_once(line)


def _unknown(body: object) -> set[str]:
    extra = (body.model_extra if isinstance(body, BaseModel) else None) or {}
    return {name for name, value in extra.items() if value is not None} - _FOR_OTHERS


def _hint(field: str, body: object) -> str:
    near = difflib.get_close_matches(field[:60], type(body).model_fields, 1, 0.8)  # type: ignore[attr-defined]
    return f"; did you mean {near[0]}?" if near else ""


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
