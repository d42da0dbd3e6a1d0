"""Answers as streams: server-sent events, or Ollama's lines of JSON.

The model never waits for a client: how long one may leave its answer unread is up to the connection
(`connection.py`), and the slot is free as soon as the answer is complete.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_local.server.http.errors import api_error, error_of

T = TypeVar("T")

KEEP_ALIVE_S = 5.0
"""After this time without an event a comment is sent, so that no proxy closes the connection."""


@dataclass(frozen=True)
class NamedEvent:
    """An event with an `event:` line, as `/v1/responses` and `/v1/messages` have them."""

    name: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Comment:
    """One line for people who look at the stream. Programs skip it."""

    text: str


ServerEvent = Mapping[str, Any] | NamedEvent | Comment
"""An object to write as JSON, the same with a name, or a comment."""


@dataclass(frozen=True)
class StreamForm:
    """The form of one API's streams. `keep_alive` is sent while there is nothing else to send."""

    media_type: str
    encode: Callable[[Any], bytes]
    encode_error: Callable[[Any], bytes]
    keep_alive: bytes = b""
    end: bytes = b""


def event_form(
    *, done: str | None = "[DONE]", keep_alive: ServerEvent | None = None, name_error: bool = False
) -> StreamForm:
    """Server-sent events, with `done` after the last one.

    `keep_alive` is an event, which is also sent after each comment; without it a comment is sent.
    `name_error` gives the event of an error the name "error".
    """
    beat = b"" if keep_alive is None else _event(keep_alive)
    return StreamForm(
        media_type="text/event-stream",
        encode=lambda event: _event(event) + (beat if isinstance(event, Comment) else b""),
        encode_error=(lambda body: _event(NamedEvent("error", body))) if name_error else _event,
        keep_alive=beat or b": \n\n",
        end=b"" if done is None else f"data: {done}\n\n".encode(),
    )


def _event(event: ServerEvent) -> bytes:
    """Raises ValueError for NaN and infinity, which JSON does not have."""
    if isinstance(event, Comment):
        return f": {event.text}\n\n".encode()
    if isinstance(event, NamedEvent):
        return f"event: {event.name}\ndata: {_json(event.data)}\n\n".encode()
    return f"data: {_json(event)}\n\n".encode()


def _line(data: Any) -> bytes:
    """Nothing for a comment: clients would take any line for a part of the answer."""
    return b"" if isinstance(data, Comment) else f"{_json(data)}\n".encode()


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


LINES = StreamForm("application/x-ndjson", _line, _line)
"""A line of JSON for each item."""


class AnswerStream(Response):
    """A response of `events`, written in `form`.

    An error before the first event is raised, so that it gets a status of its own; a later one
    becomes the last event. `events` is closed however the stream ends, so that a client that leaves
    frees its slot within one round.
    """

    def __init__(self, events: AsyncGenerator[Any, None], form: StreamForm) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=form.media_type)
        del self.headers["content-length"]
        self._events = events
        self._form = form
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(self._send_all(scope, send), receive)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        try:
            await self._send_events(send)
        except Exception as error:
            if not self._started:
                raise
            _, body = error_of(api_error(error), scope)
            await self._write(send, self._form.encode_error(body))
        else:
            await self._write(send, self._form.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        coming = asyncio.ensure_future(anext(self._events))
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
                if data := self._form.encode(event):
                    await self._write(send, data)
                coming = asyncio.ensure_future(anext(self._events))
        finally:
            coming.cancel()
            await asyncio.wait({coming})
            with suppress(Exception):
                await self._events.aclose()

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


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of `work`, or None if the client leaves before there is one: `work` is
    cancelled then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({gone, working})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
