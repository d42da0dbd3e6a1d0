"""Request bodies, checked before anything else reads them: their size, the time that they take,
whether they are JSON, and how many values that JSON holds."""

import asyncio
import codecs
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.server.http.errors import OLLAMA_PATH, ApiError, bad_request, unavailable
from dflash_local.server.http.settings import ServerSettings

_MOST_VALUES = 300_000
"""More than a prompt of the longest context as token ids. Python reads as many in 0.1 s, during
which all other clients wait; eight megabytes of `[],[],` would take seconds."""
_MOST_PARTS = 100_000
"""Lists, objects and their fields, which take three times as long: more than ten thousand messages
or five hundred tools have."""

_LARGE = 1 << 20
_MOST_LARGE = 32 << 20
"""Bytes of the bodies above `_LARGE`, mostly pictures, that are being answered. Each takes up to
five times as much: as bytes, as text, and as what its pictures are decoded to. Others wait."""
_MOST_WAITING = 4 * _MOST_LARGE
"""Bytes of those others. They have been read, so each takes its size while it waits."""

body_bytes: ContextVar[int] = ContextVar("body_bytes", default=0)
"""The number in the body of the request that is being answered."""


class BodyCheck:
    """Middleware that reads each request's body to its end, and passes it on or refuses it.

    Ollama's clients send no content type, or curl's own: on its paths bodies are JSON with any,
    unless a web page sends them, as pages can send other types to any server without asking first.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max = settings.max_body
        self._seconds = settings.body_s
        self._n_large = self._n_waiting = 0
        self._has_room, self._next = asyncio.Condition(), asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may have believed the other one, and see two requests here, or one there.
            both = "the request has both Content-Length and Transfer-Encoding; send one of them"
            raise _last(400, both)
        coding = headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            given = f"the body is encoded as {coding[:40]!r}; send it as it is"
            raise _last(415, given, "unsupported_media_type")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max:
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except asyncio.TimeoutError:
            late = f"the body did not arrive within {self._seconds:g} seconds"
            raise _last(408, late) from None
        if body is None:  # the client has left
            return
        body = body.removeprefix(codecs.BOM_UTF8)
        if body:
            if scope["path"].startswith(OLLAMA_PATH) and "origin" not in headers:
                scope = {**scope, "headers": list(scope["headers"])}
                MutableHeaders(scope=scope)["content-type"] = "application/json"
            _check(Headers(scope=scope).get("content-type", ""), body)
            await asyncio.sleep(0)  # others may go on before FastAPI reads it once more
        body_bytes.set(len(body))
        if len(body) <= _LARGE:
            await self._app(scope, _replayed(body, receive), send)
            return
        async with self._room_for(len(body), receive) as may_go_on:
            if may_go_on:
                await self._app(scope, _replayed(body, receive), send)

    @asynccontextmanager
    async def _room_for(self, n: int, receive: Receive) -> AsyncIterator[bool]:
        """Wait until few enough other large bodies are being answered; False if the client leaves
        before that."""
        if self._n_waiting and self._n_waiting + n > _MOST_WAITING:
            raise unavailable(
                f"other requests of more than {_LARGE >> 20} MiB wait already, "
                f"{self._n_waiting >> 20} MiB in all; send this one again later",
                code="too_many_large_bodies",
            )
        waits = asyncio.ensure_future(self._wait_for_room(n))
        leaves = asyncio.ensure_future(receive())
        self._n_waiting += n
        has_room = False
        try:
            try:
                await asyncio.wait((waits, leaves), return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._n_waiting -= n
                leaves.cancel()
                has_room = not waits.cancel()  # else it ends before it has taken any
            yield has_room
        finally:
            if has_room:
                async with self._has_room:
                    self._n_large -= n
                    self._has_room.notify_all()

    async def _wait_for_room(self, n: int) -> None:
        async with self._next, self._has_room:  # in the order in which they came
            await self._has_room.wait_for(lambda: self._n_large + n <= max(n, _MOST_LARGE))
            self._n_large += n

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        told = f"the body is larger than {self._max} bytes; send less text"
        return _last(413, told, "body_too_large")


def _last(status: int, message: str, code: str | None = None) -> ApiError:
    """After which the connection ends: the rest of the body is not read."""
    return ApiError(status, message, code=code, headers={"Connection": "close"})


def _check(content_type: str, body: bytes) -> None:
    """Refuse what is not JSON, or what FastAPI's own parser would accept or recurse into too
    deeply."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind[:100] or 'missing'!r}; send JSON, with "
            "'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    for most, marks, what in (
        (_MOST_VALUES, (b",", b"[", b"{"), "values; send a prompt as a text, or less"),
        (_MOST_PARTS, (b"[", b"{", b":"), "lists, objects and fields; send less"),
    ):
        if _more_than(most, body, marks):
            raise ApiError(413, f"the body holds more than {most} {what}", code="body_too_large")
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _more_than(most: int, body: bytes, marks: tuple[bytes, ...]) -> bool:
    """Whether a JSON text has more of these marks outside of texts, or about as many: each value
    follows a comma, or is the first inside of brackets. The first, quick count includes marks
    inside of texts, and is mostly low enough."""
    if _count(marks, body) <= most:
        return False
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') // 2 > 2 * most:
        return True
    return _count(marks, b"".join(bare.split(b'"')[::2])) > most


def _count(marks: tuple[bytes, ...], text: bytes) -> int:
    return sum(map(text.count, marks))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body, and then the messages after it: the client's disconnect."""
    unread = True

    async def replay() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
