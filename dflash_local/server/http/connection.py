"""One client's connection: uvicorn's, with limits where uvicorn has none."""

import asyncio
import json
from asyncio import TimerHandle
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_local.server.http.errors import ApiError, bad_request, unavailable
from dflash_local.server.http.settings import ServerSettings


class BoundedConnection(H11Protocol):
    """Is closed when a client does not finish a request's head, or does not read its answer.

    A slow reader does not stop the model: the answer waits in memory until the connection is cut.
    """

    def __init__(self, limits: ServerSettings, **given: Any) -> None:
        super().__init__(**given)
        self.limits = limits
        self._read_s = limits.read_s
        self._timers: dict[str, TimerHandle] = {}

    def hurry(self, read_s: float) -> None:
        """From now on the client gets no more than `read_s` seconds to read an answer's bytes."""
        self._read_s = min(self._read_s, read_s)
        if "unread" in self._timers:
            self._stop("unread")
            self._start("unread", self._read_s, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.write(_raw(unavailable("too many connections", code="too_many_connections")))
            self._close()
        else:
            self._start("head", self.limits.head_s, self._close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # After a request was refused, the rest of its body may still arrive.
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop("head")
        elif self.timeout_keep_alive_task is None:
            self._start("head", self.limits.head_s, self._close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("unread", self._read_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("unread")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for name in tuple(self._timers):
            self._stop(name)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for anything that is not HTTP."""
        try:
            self.conn.send(h11.Response(status_code=400, headers=[("connection", "close")]))
        except h11.LocalProtocolError:  # an answer has already begun
            self.transport.close()
            return
        self.transport.write(_raw(bad_request("this is not a valid HTTP request")))
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """`close` alone waits for the client to read the rest, however long that takes."""
        self._start("abort", self.limits.read_s, self.transport.abort)

    def _start(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Begin to wait for something, unless that is begun."""
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(seconds, work)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
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
