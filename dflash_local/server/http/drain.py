"""Which requests run, and whether new ones are still taken."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from dflash_local.server.http.errors import unavailable
from dflash_local.server.http.security import OPEN_PATHS


class Drain:
    """Counts running requests; once draining, none is begun any more. One event loop owns it."""

    def __init__(self) -> None:
        self.draining = False
        self.n_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Until no request runs."""
        await self._idle.wait()

    def begin(self) -> None:
        self.n_running += 1
        self._idle.clear()

    def end(self) -> None:
        self.n_running -= 1
        if not self.n_running:
            self._idle.set()


class DrainCheck:
    """Refuses requests while the server drains, all but those that ask how it is."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if self._drain.draining:
            raise unavailable(
                "the server is shutting down and takes no new requests", code="shutting_down"
            )
        self._drain.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.end()
