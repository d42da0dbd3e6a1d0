"""Streams: an asynchronous iterator's items, as they come, until the client is gone. Server-sent
events, and Ollama's lines of JSON.

How long a client may leave what is written to it unread is the connection's matter
(`connection.py`): the model never waits for it, and its slot is free once the answer is made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_local.server.http.errors import api_error, form_of

KEEP_ALIVE_S = 5.0
"""After so long without an event a comment is sent, so that nobody on the way gives up."""

_COMMENT = b": \n\n"


@dataclass(frozen=True)
class NamedEvent:
    """An event with an `event:` line, as `/v1/responses` and `/v1/messages` have them."""

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Comment:
    """One line for whoever looks at the stream; programs leave it out."""

    text: str


Event = str | Mapping[str, Any] | NamedEvent | Comment
"""A JSON text, what becomes one, such with a name, or a comment."""


@dataclass(frozen=True)
class StreamForm:
    """How one API writes a stream. `keep_alive` is sent while nothing else is, and with a comment;
    `has_comments`: it can have any."""

    media_type: str
    encode: Callable[[Any], bytes]
    encode_error: Callable[[Any], bytes]
    keep_alive: bytes
    end: bytes
    has_comments: bool

    def item(self, item: Any) -> bytes:
        """The bytes of an item; none for what cannot be told."""
        if not isinstance(item, Comment):
            return self.encode(item)
        if not self.has_comments:
            return b""
        return self.encode(item) + (b"" if self.keep_alive == _COMMENT else self.keep_alive)


def event_form(
    *, done: str | None = "[DONE]", keep_alive: Event | None = None, name_error: bool = False
) -> StreamForm:
    """Server-sent events, with `done` after the last of them. `keep_alive` is sent while none
    comes; without one it is a comment. `name_error`: the event that tells of an error has that
    name."""
    return StreamForm(
        media_type="text/event-stream",
        encode=encode,
        encode_error=(lambda told: encode(NamedEvent("error", told))) if name_error else encode,
        keep_alive=_COMMENT if keep_alive is None else encode(keep_alive),
        end=b"" if done is None else encode(done),
        has_comments=True,
    )


def encode(event: Event) -> bytes:
    """The bytes of one event. Raises ValueError for NaN and infinity, which are no JSON."""
    head, data = "", event
    if isinstance(event, Comment):
        return f": {event.text}\n\n".encode()
    if isinstance(event, NamedEvent):
        head, data = f"event: {event.name}\n", event.data
    text = data if isinstance(data, str) else _json(data)
    return f"{head}data: {text}\n\n".encode()


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _line(data: Any) -> bytes:
    return f"{_json(data)}\n".encode()


LINES = StreamForm(
    media_type="application/x-ndjson",
    encode=_line,
    encode_error=_line,
    keep_alive=b"",
    end=b"",
    has_comments=False,
)
"""A line of JSON for each item. Nothing keeps the stream alive while none comes: clients take each
line for a piece of the answer."""


class Stream(Response):
    """A response of `events`, written as `form` has it.

    Whatever `events` raises before the first event is raised, so that it is answered with a status
    of its own; what it raises later is the last event. `events` is closed when the stream ends in
    whatever way: a client that is gone frees its slot within one round.
    """

    def __init__(self, events: AsyncIterator[Any], form: StreamForm) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=form.media_type)
        del self.headers["content-length"]
        self._events = events
        self._form = form
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(scope, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({pump, gone})
        if not pump.cancelled():
            pump.result()

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            await self._send_events(send)
        except Exception as error:
            if not self._started:
                raise
            _, told = form_of(scope)(api_error(error))
            await self._write(send, self._form.encode_error(told))
        else:
            await self._write(send, self._form.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        coming: asyncio.Future[Any] = asyncio.ensure_future(_next(self._events))
        try:
            while True:
                await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
                if not coming.done():
                    if self._form.keep_alive:
                        await self._write(send, self._form.keep_alive)
                    continue
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                if data := self._form.item(event):
                    await self._write(send, data)
                coming = asyncio.ensure_future(_next(self._events))
        finally:
            coming.cancel()
            await asyncio.wait({coming})
            await _close(self._events)

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(events: AsyncIterator[Any]) -> Any:
    return await events.__anext__()


async def _close(events: AsyncIterator[Any]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        with suppress(Exception):
            await close()
