"""The models of one server: loaded when they are first asked for, unloaded when they are idle.

A model is unloaded after `keep_alive_s` without requests, or earlier where another one needs its
memory, but never while requests run on it. Models are loaded one at a time, in the order of the
requests. All methods but `close` belong to one event loop.
"""

import asyncio
import logging
import math
import time
from asyncio import Task
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool

from dflash_local.embedder import Embedder
from dflash_local.errors import QueueFullError
from dflash_local.fit.plan import Plan
from dflash_local.llama import runtime
from dflash_local.llama.runtime import Device
from dflash_local.model import Model
from dflash_local.server.http.errors import ApiError, log_crash
from dflash_local.server.models.eviction import Planner, first_to_evict, fits, without
from dflash_local.server.models.keep_alive import DEFAULT_S, FOREVER
from dflash_local.server.models.served_model import (
    Claim,
    LoadedModel,
    LoadFailure,
    ModelLoad,
    ServedModel,
)
from dflash_local.server.models.source import ModelSource, Use

log = logging.getLogger("dflash_local.server")

SourceOf = Callable[[str, Callable[[str], None], Sequence[Device]], ModelSource]
"""The model of a name, whose files are fetched where they are missing. It is given a function that
gets a line for each step, and the devices of a machine that it has to fit."""

_RETRY_S = 5
_MADE = {"chat": "text", "embedding": "embeddings", "rerank": "scores of documents"}
_HOW = {
    "chat": "serve one that writes text with --target or --model",
    "embedding": "add --embedding-model FILE to `dflash-local serve`, with an embedding model such "
    "as nomic-embed-text or bge-m3",
    "rerank": "add --embedding-model FILE to `dflash-local serve`, with a reranker such as "
    "bge-reranker-v2-m3",
}


class ModelPool:
    """`models` by their names. Requests that name no model get the first one of their use."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        *,
        keep_alive_s: float | None = None,
        queue_timeout_s: float | None = None,
        devices: Callable[[], Sequence[Device]] = runtime.devices,
        further: SourceOf | None = None,
    ) -> None:
        """`sources`: each has another name.
        `keep_alive_s`: how long idle models stay; with None for ever, whatever requests say.
        `queue_timeout_s`: how long a request may wait for its model, and again for its turn.
        `devices`: tells the memory that the machine has left.
        `further`: finds models that are added; None if there are to be none."""
        self.is_pinned = keep_alive_s is None
        usual_s = self._usual_s = FOREVER if keep_alive_s is None else keep_alive_s
        self._queue_timeout_s = queue_timeout_s
        self._devices = devices
        self.further = further
        self.models: dict[str, ServedModel] = {}
        for source in sources:
            own_s = source.keep_alive_s
            self.models[source.name] = ServedModel(source, usual_s if own_s is None else own_s)
        self._given = frozenset(self.models)
        self._load_lock = asyncio.Lock()
        self._claim_ended = asyncio.Event()
        self._tasks: set[Task[None]] = set()

    @property
    def names(self) -> list[str]:
        return list(self.models)

    @property
    def writers(self) -> list[str]:
        """The names of those that write texts."""
        return [name for name, served in self.models.items() if served.source.use == "chat"]

    def find(self, name: str | None, use: Use | None = None) -> ServedModel:
        """The model for a request, of those for its `use`: one that names none gets the first, and
        so does one with an unknown name where the server began with one such model. Else ApiError
        is raised for it, and for a model of another use."""
        fitting = [each for each in self.models.values() if use in (None, each.source.use)]
        known = self._known(name)
        if use and (not fitting or not (known is None or known in fitting)):
            raise _unfit(known or next(iter(self.models.values())), use, fitting)
        takes_any = sum(each.name in self._given for each in fitting) == 1 and known is None
        return fitting[0] if takes_any or not name else self.named(name)

    def named(self, name: str) -> ServedModel:
        """The model of exactly that name or alias. Raises ApiError."""
        if (known := self._known(name)) is not None:
            return known
        names = ", ".join(map(repr, self.models))
        are = "are" if len(self.models) > 1 else "is"
        raise ApiError(
            404,
            f"model {name[:256]!r} not found; {names[:1000]} {are} served here",
            param="model",
            code="model_not_found",
        )

    def _known(self, name: str | None) -> ServedModel | None:
        named = (each for each in self.models.values() if name in each.source.aliases)
        return self.models.get(name or "") or next(named, None)

    def adopt(self, name: str, model: Model | Embedder) -> None:
        """Serve `model`, which is loaded already, as the model of that name."""
        self.models[name].model = model

    def start(self) -> None:
        """Begin to count the time that models are idle, on the running event loop."""
        for served in self.models.values():
            self._start_idle_timer(served)

    # Further ones

    def add(self, source: ModelSource) -> None:
        """Serve one more model. It is loaded when a request first names it."""
        usual_s = DEFAULT_S if self.is_pinned else self._usual_s
        self.models[source.name] = ServedModel(source, usual_s)

    async def withdraw(self, name: str) -> None:
        """Serve a model no longer that was added, and close it. Raises ApiError if it is in use,
        or the server was started with it."""
        served = self.named(name)
        if name in self._given:
            raise _in_use(f"{name} is what this server was started with")
        if served.running or served.waiting or served.state == "loading":
            raise _in_use(f"{name} is in use: try again when its answers have ended")
        del self.models[name]
        self._cancel_idle_timer(served)
        self._unload(served, "as it is removed")
        if served.close_task is not None:
            await served.close_task

    def whole_machine(self) -> list[Device]:
        """The devices as they would be without these models."""
        plans = [each.model.plan for each in self.models.values() if each.model]
        return without(self._devices(), [plan for plan in plans if plan])

    # Using them

    @contextmanager
    def claim(
        self, name: str | None, keep_alive_s: float | None = None, use: Use = "chat"
    ) -> Iterator[Claim]:
        """A hold on a model for a `use`, which is loaded if it is not. `keep_alive_s`: how long it
        stays loaded afterwards.

        Raises ApiError for an unknown name, QueueFullError if too many requests wait for it.
        """
        served = self.find(name, use)
        claim = Claim(served, self._queue_timeout_s)
        self._begin_claim(served, claim)
        if not self.is_pinned:
            usual = served.usual_keep_alive_s
            served.keep_alive_s = usual if keep_alive_s is None else keep_alive_s
        try:
            yield claim
        finally:
            served.running.discard(claim)
            served.waiting.discard(claim)
            self._claim_ended.set()
            self._start_idle_timer(served)

    @asynccontextmanager
    async def use(
        self, name: str | None, keep_alive_s: float | None = None
    ) -> AsyncIterator[LoadedModel]:
        """A model, once it is loaded. Raises as `claim` and `Claim.loaded`."""
        with self.claim(name, keep_alive_s) as claim:
            yield await claim.loaded(Model)

    def unload(self, name: str) -> None:
        """Unload the model of that name as soon as no request uses it. Raises ApiError."""
        served = self.named(name)
        served.keep_alive_s = 0
        self._start_idle_timer(served)

    def close(self, limit_s: float = 5.0) -> bool:
        """Close all models, also one that is being loaded: False if that takes longer than
        `limit_s`. The event loop must have ended."""
        served_models = self.models.values()
        loads = [served.load for served in served_models if served.load is not None]
        for load in loads:
            load.stop()
        for served in served_models:
            if served.model is not None:
                served.model.close()
                served.model = None
        return all([load.end(limit_s) for load in loads])  # a list: each of them is to end

    def _begin_claim(self, served: ServedModel, claim: Claim) -> None:
        self._cancel_idle_timer(served)
        most = served.source.max_queue
        if served.takes_requests:
            too_many = most is not None and len(served.running) > most
            if too_many and isinstance(served.model, Embedder):  # a Model counts by itself
                raise QueueFullError(
                    f"{len(served.running)} requests wait for {served.name}; try again later",
                    _RETRY_S,
                )
            served.running.add(claim)
            claim.settled.set()
            return
        if most is not None and len(served.waiting) > most:
            raise QueueFullError(
                f"{len(served.waiting)} requests wait for {served.name} to be loaded; try again "
                "later",
                _RETRY_S,
            )
        served.waiting.add(claim)
        if served.load_task is None or served.load_task.done():
            served.load_task = self._start(self._load_in_turn(served))

    # Loading

    async def _load_in_turn(self, served: ServedModel) -> None:
        """Load a model for the requests that wait for it, once no other one is being loaded."""
        async with self._load_lock:
            try:
                await self._drop_lost(served)
                if served.close_task is not None:
                    await served.close_task
                if served.model is None and served.waiting:
                    await self._make_room(served)
                if served.model is None and served.waiting:
                    await self._load(served)
            except Exception as error:
                failure = LoadFailure.of(error, served.source)
                log.error("%s cannot be loaded: %s", served.name, failure.reason)
                served.refuse(failure)
                return
            if served.model is not None:
                served.admit()
                self._start_idle_timer(served)

    async def _drop_lost(self, served: ServedModel) -> None:
        """Unload a model that has lost a worker, once its requests have ended with that error."""
        while served.lost:
            if not served.running:
                self._unload(served, f"as a worker is lost: {served.lost}")
                return
            self._claim_ended.clear()
            await self._claim_ended.wait()

    async def _load(self, served: ServedModel) -> None:
        log.info("loading %s", served.name)
        start = time.monotonic()
        served.load = ModelLoad(served.source, self._is_idle)
        try:
            served.model = await served.load.model()
        except Exception:
            served.load = None
            raise
        served.load = served.failure = None
        log.info("loaded %s in %.1f s", served.name, time.monotonic() - start)

    def _is_idle(self) -> bool:
        return not any(served.running for served in self.models.values())

    async def _make_room(self, served: ServedModel) -> None:
        """Evict others until the model fits, or no request waits for it any more."""
        planner = None
        while served.waiting:
            while closing := [s.close_task for s in self.models.values() if s.close_task]:
                await asyncio.wait(closing)  # until they have given back their memory
            loaded = [other for other in self.models.values() if other.model is not None]
            if not loaded:
                return
            if planner is None:
                planner = await run_in_threadpool(served.source.planner)
            plans = [other.model.plan for other in loaded if other.model and other.model.plan]
            if await run_in_threadpool(self._fits, planner, plans):
                return
            await self._evict(first_to_evict(loaded), served)

    def _fits(self, planner: Planner, loaded: Sequence[Plan]) -> bool:
        return fits(planner, self._devices(), beside=loaded)

    async def _evict(self, other: ServedModel, served: ServedModel) -> None:
        """Unload `other` once its requests have ended, for the requests that wait for `served`."""
        other.leaving = True
        try:
            while other.running and served.waiting:
                self._claim_ended.clear()
                await self._claim_ended.wait()
            if not other.running:
                self._unload(other, f"to make room for {served.name}")
        finally:
            other.leaving = False
            if other.waiting and other.takes_requests:
                other.admit()

    # Unloading

    def _start_idle_timer(self, served: ServedModel) -> None:
        """Unload it in time, if it is loaded and no request uses it."""
        if served.running or served.waiting or served.model is None:
            return
        served.last_used = time.monotonic()
        self._cancel_idle_timer(served)
        if served.keep_alive_s <= 0:
            self._unload(served, "as no request uses it")
        elif served.keep_alive_s < math.inf:
            reason = f"idle for {served.keep_alive_s:g} s"
            loop = asyncio.get_running_loop()
            served.idle_timer = loop.call_later(served.keep_alive_s, self._unload, served, reason)

    @staticmethod
    def _cancel_idle_timer(served: ServedModel) -> None:
        if served.idle_timer is not None:
            served.idle_timer.cancel()
            served.idle_timer = None

    def _unload(self, served: ServedModel, reason: str) -> None:
        served.past = served.counted
        model, served.model = served.model, None
        if model is not None:
            log.info("unloading %s, %s", served.name, reason)
            served.close_task = self._start(self._close(served, model))

    async def _close(self, served: ServedModel, model: Model | Embedder) -> None:
        try:
            await asyncio.to_thread(model.close)
        except Exception as error:  # no request is there to be told
            log_crash(error)
        finally:
            served.close_task = None

    def _start(self, work: Coroutine[Any, Any, None]) -> Task[None]:
        """A task that is kept until it is done: the event loop alone would not keep it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _unfit(served: ServedModel, use: Use, fitting: Sequence[ServedModel]) -> ApiError:
    """The refusal of a request beyond `served`, and beyond all models if none is `fitting`."""
    makes, wanted = _MADE[served.source.use], _MADE[use]
    advice = f"name {', '.join(each.name for each in fitting)}" if fitting else _HOW[use]
    return ApiError(
        400 if fitting else 501,
        f"{served.name} makes {makes}, not {wanted}; {advice}",
        type="not_supported_error",
        param="model",
        code=f"{use}_not_supported",
        headers={"X-Should-Retry": "false"},  # OpenAI's clients would try again
    )


def _in_use(message: str) -> ApiError:
    return ApiError(409, message, param="model", code="model_in_use")
