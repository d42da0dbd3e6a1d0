"""The models of one server: loaded when they are first asked for, unloaded when nobody does.

A model leaves where it has been idle for its `keep_alive_s`, or where another one needs its room,
never while requests run on it. One is loaded at a time, in the order of the requests. All methods
but `close` belong to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from asyncio import Task
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import anyio.to_thread

from dflash_local.errors import QueueFullError
from dflash_local.fit.plan import Plan
from dflash_local.llama import runtime
from dflash_local.llama.runtime import Device
from dflash_local.loading import Pair
from dflash_local.model import Model
from dflash_local.server.http.errors import ApiError, log_crash
from dflash_local.server.models.eviction import first_to_go, has_room
from dflash_local.server.models.keep_alive import FOREVER
from dflash_local.server.models.load import ModelLoad
from dflash_local.server.models.load_fault import LoadFault
from dflash_local.server.models.served import Served
from dflash_local.server.models.served_model import Claim, ModelHost
from dflash_local.server.models.source import ModelSource

log = logging.getLogger("dflash_local.server")

_RETRY_S = 5


class ModelPool:
    """`sources` have names of their own; the first is what requests get that name none."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        *,
        keep_alive_s: float | None = None,
        queue_timeout_s: float | None = None,
        devices: Callable[[], Sequence[Device]] = runtime.devices,
    ) -> None:
        """`keep_alive_s` is what idle models stay; with None they stay for ever, whatever requests
        say. `queue_timeout_s`: seconds that a request may wait for its model, and for its turn.
        `devices` tells what memory the machine has left."""
        self.is_pinned = keep_alive_s is None
        usual_s = FOREVER if keep_alive_s is None else keep_alive_s
        self._queue_timeout_s = queue_timeout_s
        self._devices = devices
        self.hosts = {source.name: ModelHost(source, usual_s) for source in sources}
        self._turn = asyncio.Lock()
        self._change = asyncio.Event()
        self._tasks: set[Task[None]] = set()

    # Who is there

    @property
    def names(self) -> list[str]:
        """All that can be asked for."""
        return list(self.hosts)

    def find(self, name: str | None) -> ModelHost:
        """The model that a request gets. Where there is one only, requests may name any; of several
        one that names none gets the first. Raises ApiError for a name of no model."""
        first = next(iter(self.hosts.values()))
        return first if len(self.hosts) == 1 or not name else self.named(name)

    def named(self, name: str) -> ModelHost:
        """The model of that very name. Raises ApiError."""
        if name in self.hosts:
            return self.hosts[name]
        names = ", ".join(map(repr, self.hosts))
        are = "are" if len(self.hosts) > 1 else "is"
        raise ApiError(
            404,
            f"model {name[:256]!r} not found; {names[:1000]} {are} served here",
            param="model",
            code="model_not_found",
        )

    def adopt(self, model: Model) -> None:
        """Serve the first of the models as `model`, which is loaded already."""
        next(iter(self.hosts.values())).model = model

    def start(self) -> None:
        """Begin to count the time that models are idle, on the event loop that runs."""
        for host in self.hosts.values():
            self._rest(host)

    # Using them

    @contextmanager
    def claim(self, name: str | None, keep_alive_s: float | None = None) -> Iterator[Claim]:
        """A hold on a model, which is loaded for it. `keep_alive_s`: how long it stays afterwards.

        Raises ApiError for a name of no model, QueueFullError where too many wait for it.
        """
        host = self.find(name)
        claim = Claim(host, self._queue_timeout_s)
        self._hold(host, claim)
        if not self.is_pinned:
            host.keep_alive_s = host.usual_s if keep_alive_s is None else keep_alive_s
        try:
            yield claim
        finally:
            host.running.discard(claim)
            host.waiting.discard(claim)
            self._change.set()
            self._rest(host)

    @asynccontextmanager
    async def use(
        self, name: str | None, keep_alive_s: float | None = None
    ) -> AsyncIterator[Served]:
        """A model, once it is loaded. Raises what `claim` and `Claim.served` raise."""
        with self.claim(name, keep_alive_s) as claim:
            yield await claim.served()

    def unload(self, name: str) -> None:
        """Have the model of that name leave, once nobody uses it. Raises ApiError."""
        host = self.named(name)
        host.keep_alive_s = 0
        self._rest(host)

    def close(self, limit_s: float = 5.0) -> bool:
        """Close all models, one that is being loaded too: False where that does not end in time.
        The event loop must not run any more."""
        hosts = self.hosts.values()
        loads = [host.load for host in hosts if host.load is not None]
        for load in loads:
            load.stop()
        for host in hosts:
            if host.model is not None:
                host.model.close()
                host.model = None
        return all([load.end(limit_s) for load in loads])  # every one, whatever comes of the first

    def _hold(self, host: ModelHost, claim: Claim) -> None:
        if host.timer is not None:
            host.timer.cancel()
            host.timer = None
        if host.is_at_hand:
            host.running.add(claim)
            claim.settled.set()
            return
        most = host.source.max_queue
        if most is not None and len(host.waiting) > most:
            raise QueueFullError(
                f"{len(host.waiting)} requests wait for {host.name} to be loaded; try again later",
                _RETRY_S,
            )
        host.waiting.add(claim)
        if host.bringing is None or host.bringing.done():
            host.bringing = self._begin(self._bring(host))

    # Loading

    async def _bring(self, host: ModelHost) -> None:
        """Load a model for those who wait for it."""
        async with self._turn:
            try:
                if host.closing is not None:
                    await host.closing
                if host.model is None and host.waiting:
                    await self._make_room(host)
                if host.model is None and host.waiting:
                    await self._load(host)
            except Exception as error:
                fault = LoadFault.of(error, host.source)
                log.error("%s cannot be loaded: %s", host.name, fault.reason)
                host.refuse(fault)
                return
            if host.model is not None:
                host.admit()
                self._rest(host)

    async def _load(self, host: ModelHost) -> None:
        log.info("loading %s", host.name)
        start = time.monotonic()
        host.load = ModelLoad(host.source, self._is_idle)
        try:
            host.model = await host.load.model()
        except Exception:
            host.load = None
            raise
        host.load = host.fault = None
        log.info("loaded %s in %.1f s", host.name, time.monotonic() - start)

    def _is_idle(self) -> bool:
        return not any(host.running for host in self.hosts.values())

    async def _make_room(self, host: ModelHost) -> None:
        """Have others leave until there is room, or nobody waits any more."""
        pair = None
        while host.waiting:
            await self._closed()
            loaded = [other for other in self.hosts.values() if other.model is not None]
            if not loaded:
                return
            if pair is None:
                pair = await anyio.to_thread.run_sync(host.source.open)
            plans = [other.model.plan for other in loaded if other.model and other.model.plan]
            if await anyio.to_thread.run_sync(self._has_room, host.source, pair, plans):
                return
            await self._send_off(first_to_go(loaded), host)

    def _has_room(self, source: ModelSource, pair: Pair, loaded: Sequence[Plan]) -> bool:
        return has_room(partial(source.plan, pair), self._devices(), loaded)

    async def _send_off(self, other: ModelHost, host: ModelHost) -> None:
        """Have `other` leave once its requests have ended, for those who wait for `host`."""
        other.leaving = True
        try:
            while other.running and host.waiting:
                self._change.clear()
                await self._change.wait()
            if not other.running:
                self._unload(other, f"to make room for {host.name}")
        finally:
            other.leaving = False
            if other.waiting and other.is_at_hand:
                other.admit()

    # Unloading

    def _rest(self, host: ModelHost) -> None:
        """Have it leave in time, if nobody uses it any more."""
        if host.running or host.waiting or host.model is None:
            return
        host.last_used = time.monotonic()
        if host.timer is not None:
            host.timer.cancel()
            host.timer = None
        if host.keep_alive_s <= 0:
            self._unload(host, "as nobody uses it")
        elif host.keep_alive_s < math.inf:
            idle = f"idle for {host.keep_alive_s:g} s"
            loop = asyncio.get_running_loop()
            host.timer = loop.call_later(host.keep_alive_s, self._unload, host, idle)

    def _unload(self, host: ModelHost, why: str) -> None:
        model, host.model = host.model, None
        if model is not None:
            log.info("unloading %s, %s", host.name, why)
            host.closing = self._begin(self._close(host, model))

    async def _close(self, host: ModelHost, model: Model) -> None:
        try:
            await asyncio.to_thread(model.close)
        except Exception as error:  # there is nobody to tell but the log
            log_crash(error)
        finally:
            host.closing = None

    async def _closed(self) -> None:
        """Until what has left is gone."""
        while closing := [host.closing for host in self.hosts.values() if host.closing]:
            await asyncio.wait(closing)

    def _begin(self, work: Coroutine[Any, Any, None]) -> Task[None]:
        """A task of its own; the event loop alone would not keep it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
