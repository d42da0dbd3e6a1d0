"""A model that the server offers, by its name: its load, on a thread of its own, the requests that
use it, and those that wait for it."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from asyncio import Task, TimerHandle
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, ParamSpec, TypeVar

from dflash_local.embedder import Embedder
from dflash_local.errors import ClosedError, DflashError, FileError, PairError, QueueTimeoutError
from dflash_local.model import Model
from dflash_local.result import ModelStatus
from dflash_local.server.http.bodies import body_bytes
from dflash_local.server.http.errors import ApiError, log_crash, unavailable
from dflash_local.server.models.keep_alive import FOREVER
from dflash_local.server.models.source import ModelSource

_FAILURE_CODE = "model_load_failed"


class ModelLoad:
    """Begins at once. `part` is the loaded part of the target's weights, from 0 to 1. `is_alone`
    tells whether no request runs on another model."""

    def __init__(self, source: ModelSource, is_alone: Callable[[], bool]) -> None:
        self.part = 0.0
        self._source = source
        self._is_alone = is_alone
        self._stopped = threading.Event()
        self._loaded = Future[Model | Embedder]()
        # It may be inside of llama.cpp for minutes; a daemon does not hold up the process's end.
        self._thread = threading.Thread(
            target=self._run, name=f"dflash-local load {source.name}", daemon=True
        )
        self._thread.start()

    async def model(self) -> Model | Embedder:
        """The model, once it is loaded. Raises as the loading does."""
        return await asyncio.wrap_future(self._loaded)

    def stop(self) -> None:
        """End it as soon as possible: while weights are read, or between two steps."""
        self._stopped.set()

    def end(self, limit_s: float) -> bool:
        """Wait for the thread and close the model that it has loaded; False if it takes longer
        than that."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return False
        if not self._loaded.cancelled() and self._loaded.exception() is None:
            self._loaded.result().close()
        return True

    def _run(self) -> None:
        self._loaded.set_running_or_notify_cancel()
        try:
            model = self._source.load(self._on_progress, self._is_alone)
        except BaseException as error:
            self._loaded.set_exception(error)
        else:
            self._loaded.set_result(model)

    def _on_progress(self, part: float) -> None:
        if self._stopped.is_set():
            raise ClosedError("the server ends")
        self.part = part


@dataclass(frozen=True)
class LoadFailure:
    """The reason why a model could not be loaded. `reason` is one line without folders. `lasting`:
    the files are at fault, so trying again will not help."""

    reason: str
    lasting: bool

    @classmethod
    def of(cls, error: BaseException, source: ModelSource) -> LoadFailure:
        """From `error`, which was raised while `source` was loaded."""
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
        elif isinstance(error, DflashError | MemoryError):
            reason = str(error) or "there is not enough memory"
        else:
            log_crash(error)
            reason = "the server failed at it; its log says more"
        for path in (source.target, source.draft):
            if path is not None:
                reason = reason.replace(str(path), path.name)
        return cls(" ".join(reason.split()), isinstance(error, FileError | PairError))

    def api_error(self, name: str) -> ApiError:
        """The answer to a request for the model of that name."""
        message = f"{name} cannot be loaded: {self.reason}"
        if self.lasting:
            return ApiError(500, message, type="server_error", param="model", code=_FAILURE_CODE)
        return unavailable(message, code=_FAILURE_CODE)


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", Model, Embedder)

PROGRESS_S = 1.0
"""Time between two lines of progress to a request that waits for a model, and before the first."""

_SHORT = 4
_LONG = 2
_LONG_BYTES = 64 << 10
"""Of a body. Any text of that length is tokenised in some 50 ms."""


class RequestThreads:
    """Threads that prepare the requests of one model: they render, tokenise and count.

    They are this model's own, so that no other model waits for them. A long request waits for long
    ones only, and a short one for short ones.
    """

    def __init__(self, model: str) -> None:
        self._short = ThreadPoolExecutor(_SHORT, f"dflash-local requests {model}")
        self._long = ThreadPoolExecutor(_LONG, f"dflash-local long requests {model}")

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, for the request that is being answered. One that is given up
        leaves the queue."""
        threads = self._long if body_bytes.get() > _LONG_BYTES else self._short
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, partial(work, *args, **kwargs))


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """A model as requests get it. `queue_timeout_s`: how long a request may wait for its turn; None
    is without limit. `threads` prepare its requests."""

    source: ModelSource
    model: M
    threads: RequestThreads
    queue_timeout_s: float | None = None

    @property
    def name(self) -> str:
        """Its name in answers."""
        return self.source.name

    def limited(self, max_tokens: int | None) -> int | None:
        """The length limit of an answer for which a request asks for `max_tokens`."""
        return min(filter(None, (max_tokens, self.source.max_tokens)), default=None)


LoadedModel = Loaded[Model]


@dataclass(eq=False)
class ServedModel:
    """The state of one model. The pool changes it, on its event loop; others only read."""

    source: ModelSource
    usual_keep_alive_s: float = FOREVER
    """Seconds that it stays loaded after a request that does not say."""
    model: Model | Embedder | None = None
    running: set[Claim] = field(default_factory=set)
    waiting: set[Claim] = field(default_factory=set)
    leaving: bool = False
    """It takes no new requests: it is unloaded as soon as the running ones have ended."""
    load: ModelLoad | None = None
    load_task: Task[None] | None = None
    close_task: Task[None] | None = None
    failure: LoadFailure | None = None
    """The reason why the last attempt to load it failed."""
    threads: RequestThreads = field(init=False)
    keep_alive_s: float = field(init=False)
    """As the last request wanted it."""
    last_used: float = -math.inf
    idle_timer: TimerHandle | None = None
    past: ModelStatus | None = None
    """Its counts when it was unloaded last."""

    def __post_init__(self) -> None:
        self.threads = RequestThreads(self.name)
        self.keep_alive_s = self.usual_keep_alive_s

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def writer(self) -> Model | None:
        """The model, if it is loaded and writes texts."""
        return self.model if isinstance(self.model, Model) else None

    @property
    def lost(self) -> str:
        """The reason why a worker of it is gone; else empty."""
        return self.writer.target.lost if self.writer else ""

    @property
    def counted(self) -> ModelStatus | None:
        """Its status, counted since the server began; of one that is not loaded only the counts
        mean something. None if it never was loaded."""
        if self.model is None:
            return self.past
        status = self.model.status()
        return status if self.past is None else status.after(self.past)

    @property
    def takes_requests(self) -> bool:
        return self.model is not None and not self.leaving and not self.lost

    @property
    def state(self) -> Literal["unloaded", "loading", "loaded"]:
        if self.waiting:
            return "loading"
        return "unloaded" if self.model is None else "loaded"

    @property
    def expires_in_s(self) -> float:
        """Seconds until it is unloaded, unless another request comes."""
        if self.running:
            return self.keep_alive_s
        return max(0.0, self.last_used + self.keep_alive_s - time.monotonic())

    def admit(self) -> None:
        """It is loaded: the requests that have waited may run."""
        self.running |= self.waiting
        self.waiting.clear()
        for claim in self.running:
            claim.settled.set()

    def refuse(self, failure: LoadFailure) -> None:
        """It cannot be loaded: the requests that have waited fail."""
        self.failure = failure
        for claim in self.waiting:
            claim.failure = failure
            claim.settled.set()
        self.waiting.clear()

    def progress(self) -> str:
        """A line on its progress, for requests that wait."""
        if self.load is None:
            return f"waiting to load {self.name}"
        if self.load.part == 1:  # of the weights; what comes then takes seconds
            return f"loading {self.name} and measuring what drafts cost, if that is not known"
        return f"loading {self.name} {self.source.size}{100 * self.load.part:.0f} %"


class Claim:
    """One request's hold on a model. While there is one, the model stays loaded, or is going to be
    loaded."""

    def __init__(self, served: ServedModel, timeout_s: float | None) -> None:
        self.settled = asyncio.Event()
        """Set once the model is loaded or has failed to."""
        self.failure: LoadFailure | None = None
        self._served = served
        self._timeout_s = timeout_s
        self._end = math.inf if timeout_s is None else time.monotonic() + timeout_s

    async def progress(self) -> AsyncIterator[str]:
        """A line every second until the model is loaded or has failed to; none in the first."""
        while not await self._settles(PROGRESS_S):
            yield self._served.progress()

    async def loaded(self, kind: type[M]) -> Loaded[M]:
        """The model, once it is loaded: of the `kind` for the use that it was claimed for. Raises
        ApiError if that fails, QueueTimeoutError if it takes too long."""
        await self._settles(math.inf)
        served = self._served
        if self.failure is not None:
            raise self.failure.api_error(served.name)
        assert isinstance(served.model, kind), "a claimed model stays loaded"
        return Loaded(served.source, served.model, served.threads, self._timeout_s)

    async def _settles(self, within_s: float) -> bool:
        if self.settled.is_set():
            return True
        limit = min(within_s, self._end - time.monotonic())
        try:
            await asyncio.wait_for(self.settled.wait(), None if limit == math.inf else limit)
        except asyncio.TimeoutError:
            if limit < within_s:
                raise QueueTimeoutError(
                    f"{self._served.name} was not loaded within {self._timeout_s:g} seconds; try "
                    "again later"
                ) from None
        return self.settled.is_set()
