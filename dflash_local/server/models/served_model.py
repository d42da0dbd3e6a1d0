"""One model by its name: whether it is loaded, who uses it, and who waits for it."""

from __future__ import annotations

import asyncio
import math
import time
from asyncio import Task, TimerHandle
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from dflash_local.errors import QueueTimeoutError
from dflash_local.model import Model
from dflash_local.server.models.keep_alive import FOREVER
from dflash_local.server.models.load import ModelLoad
from dflash_local.server.models.load_fault import LoadFault
from dflash_local.server.models.served import Served
from dflash_local.server.models.source import ModelSource

State = Literal["unloaded", "loading", "loaded"]

TELL_S = 1.0
"""Between two words to those who wait for a model, and before the first."""


@dataclass(eq=False)
class ModelHost:
    """What is known of one model. The pool changes it, on its event loop; others read."""

    source: ModelSource
    server_s: float = FOREVER
    """Seconds that models stay loaded without requests, unless they or those say otherwise."""
    model: Model | None = None
    running: set[Claim] = field(default_factory=set)
    waiting: set[Claim] = field(default_factory=set)
    leaving: bool = False
    """It takes no new requests: it goes once those that run have ended."""
    load: ModelLoad | None = None
    bringing: Task[None] | None = None
    closing: Task[None] | None = None
    fault: LoadFault | None = None
    """Why it could not be loaded the last time."""
    keep_alive_s: float = field(init=False)
    """What the last request has left it."""
    last_used: float = -math.inf
    timer: TimerHandle | None = None

    def __post_init__(self) -> None:
        self.keep_alive_s = self.usual_s

    @property
    def usual_s(self) -> float:
        """Seconds that it stays loaded unless a request says otherwise."""
        own = self.source.keep_alive_s
        return self.server_s if own is None else own

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def n_running(self) -> int:
        return len(self.running)

    @property
    def is_at_hand(self) -> bool:
        return self.model is not None and not self.leaving

    @property
    def state(self) -> State:
        if self.waiting:
            return "loading"
        return "unloaded" if self.model is None else "loaded"

    @property
    def expires_in_s(self) -> float:
        """Seconds until it is unloaded, if nobody uses it again."""
        if self.running:
            return self.keep_alive_s
        return max(0.0, self.last_used + self.keep_alive_s - time.monotonic())

    def admit(self) -> None:
        """It is loaded: let those run that have waited for it."""
        self.running |= self.waiting
        self.waiting.clear()
        for claim in self.running:
            claim.settled.set()

    def refuse(self, fault: LoadFault) -> None:
        """It cannot be loaded: say so to those who have waited for it."""
        self.fault = fault
        for claim in self.waiting:
            claim.fault = fault
            claim.settled.set()
        self.waiting.clear()

    def progress(self) -> str:
        """How far it is, in words for those who wait."""
        if self.load is None:
            return f"waiting to load {self.name}"
        return f"loading {self.name} {100 * self.load.part:.0f} %"


class Claim:
    """One request's hold on a model: as long as it lasts, the model stays, or is waited for."""

    def __init__(self, host: ModelHost, timeout_s: float | None) -> None:
        self.settled = asyncio.Event()
        """Whether the model is loaded, or cannot be."""
        self.fault: LoadFault | None = None
        self._host = host
        self._timeout_s = timeout_s
        self._end = math.inf if timeout_s is None else time.monotonic() + timeout_s

    async def progress(self) -> AsyncIterator[str]:
        """A line every second, until the model is loaded or cannot be; none within the first."""
        while not await self._settles(TELL_S):
            yield self._host.progress()

    async def served(self) -> Served:
        """The model, once it is loaded. Raises ApiError where it cannot be, QueueTimeoutError where
        that takes too long."""
        await self._settles(math.inf)
        if self.fault is not None:
            raise self.fault.error(self._host.name)
        model = self._host.model
        assert model is not None, "what is claimed stays loaded"
        return Served(self._host.name, model, self._timeout_s)

    async def _settles(self, within_s: float) -> bool:
        if self.settled.is_set():
            return True
        limit = min(within_s, self._end - time.monotonic())
        try:
            await asyncio.wait_for(self.settled.wait(), None if limit == math.inf else limit)
        except asyncio.TimeoutError:
            if limit < within_s:
                raise QueueTimeoutError(
                    f"{self._host.name} was not loaded within {self._timeout_s:g} seconds; try "
                    "again later"
                ) from None
        return self.settled.is_set()
