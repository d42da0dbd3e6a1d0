"""Which requests run, and whether new ones are still taken."""

from __future__ import annotations

import asyncio


class Drain:
    """Counts running requests; once draining, none is begun any more. One event loop owns it."""

    def __init__(self) -> None:
        self.draining = False
        self.n_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.n_running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.n_running -= 1
        if not self.n_running:
            self._idle.set()

    async def idle(self) -> None:
        """Until no request runs."""
        await self._idle.wait()
