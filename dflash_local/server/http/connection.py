"""One client's connection: uvicorn's, with what it leaves unbounded bounded."""

from __future__ import annotations

import asyncio
import json
from asyncio import TimerHandle
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_local.server.http.errors import ApiError, unavailable
from dflash_local.server.http.settings import Settings


def connection_class(settings: Settings) -> type[H11Protocol]:
    """The protocol for uvicorn's `http` option."""

    class Connection(BoundedConnection):
        bounds = settings

    return Connection


class BoundedConnection(H11Protocol):
    """Is cut off where it never finishes a request's head, or never reads what is written to it.

    A reader that is too slow stops no answer: what the model makes waits in memory, at most an
    answer's worth, until the connection is cut.
    """

    bounds: Settings

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._head: TimerHandle | None = None
        self._unread: TimerHandle | None = None
        self._end: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            transport.write(_raw(unavailable("too many connections", code="too_many_connections")))
            self._close()
        else:
            self._head = self.loop.call_later(self.bounds.head_s, self._close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A body that nobody wanted may be on its way still after its request was refused.
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._stop(self._head)
            self._head = None
        elif self._head is None and self.timeout_keep_alive_task is None:
            self._head = self.loop.call_later(self.bounds.head_s, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.bounds.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._unread)
        self._unread = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head, self._unread, self._end):
            self._stop(timer)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what is no HTTP."""
        try:
            self.conn.send(h11.Response(status_code=400, headers=[("connection", "close")]))
        except h11.LocalProtocolError:  # an answer has begun
            self.transport.close()
            return
        self.transport.write(_raw(ApiError(400, "this is no HTTP request that is taken here")))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """`close` waits, without end, for the client to read what is left."""
        if self._end is None:
            self._end = self.loop.call_later(self.bounds.read_s, self.transport.abort)

    @staticmethod
    def _stop(timer: TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def _raw(error: ApiError) -> bytes:
    body = json.dumps(error.body()).encode()
    head = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in error.headers.items()),
        "connection: close",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
