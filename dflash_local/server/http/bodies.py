"""Request bodies, held to bounds before anything reads them: bytes, seconds, JSON, its values and
their depth."""

from __future__ import annotations

import asyncio

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.settings import Settings

_MOST_VALUES = 300_000
"""A prompt of the longest context as token ids, and some. Python reads as many in 0.1 s, in which
no other client hears anything; eight megabytes of `[],[],` would take seconds."""


class BodyCheck:
    """Reads each request's body whole and passes it on in one piece, or refuses it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._max = settings.max_body
        self._seconds = settings.body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max:
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._seconds:g} seconds",
                headers={"Connection": "close"},
            ) from None
        if body is None:  # the client is gone
            return
        if body:
            _check(headers.get("content-type", ""), body)
        await self._app(scope, _replayed(body, receive), send)

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
        return ApiError(
            413,
            f"the body is larger than {self._max} bytes; send less text",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _check(content_type: str, body: bytes) -> None:
    """Refuse what is no JSON: what the routes' own parser would let by, or go too deep in."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind[:100] or 'missing'!r}; send JSON, with "
            "'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    if _n_values(body) > _MOST_VALUES:
        raise ApiError(
            413,
            f"the body holds more than {_MOST_VALUES} values; send a prompt as a text, or less",
            code="body_too_large",
        )
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON that is taken here: {error}") from None


def _n_values(body: bytes) -> int:
    """How many values a JSON text has, or a few more: each is behind a comma, or the first inside
    of brackets. A quick count takes in those in texts, and is mostly low enough."""
    n = _n_marks(body)
    if n > _MOST_VALUES:
        bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        n = bare.count(b'"') // 2
        if n <= _MOST_VALUES:
            n = _n_marks(b"".join(bare.split(b'"')[::2]))
    return n


def _n_marks(text: bytes) -> int:
    return sum(map(text.count, (b",", b"[", b"{")))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that gives the body, then what comes after it: the client's disconnect."""
    unread = True

    async def replay() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
