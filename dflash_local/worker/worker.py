"""The one thread that owns a model. It runs as many requests at once as there are slots."""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakMethod

from dflash_local.engine import scheduler
from dflash_local.engine.engine import Engine
from dflash_local.errors import ClosedError, QueueFullError, QueueTimeoutError
from dflash_local.stats import Stats
from dflash_local.worker.job import Generation, Job, Task, TextRequest

T = TypeVar("T")

_REMEMBERED = 32
"""The number of durations of ended requests kept, to estimate those of others."""


class Worker:
    """Continuous batching: requests join and leave between rounds.

    Each step of its loop takes in new jobs, begins those that fit, runs one step of the engine for
    all sequences, and hands out the new tokens; those of a round that a GPU drafts after, in the
    step after it. `scheduler` decides which jobs begin. Until its end
    the thread takes no lock. So neither a caller nor a finalizer that runs in one can block it.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.max_queue: int | None = None
        """The number of requests that may wait, besides those that run; None: any number."""
        self._engine = engine
        deliver = WeakMethod(self._deliver)  # the engine does not keep its worker

        def told() -> None:
            if hand_out := deliver():
                hand_out()

        engine.meter.when_told = told
        self._n_slots = len(engine.slots)
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for the callers that submit
        self._closed = False
        self._n_submitted = 0
        # Only the thread writes these. Others may read values that are replaced as a whole.
        self._waiting: deque[Job] = deque()
        self._running: list[Generation] = []
        self._stopping = False
        self._n_ended = 0
        self._books: tuple[int, Stats, tuple[Stats, ...]] = (0, Stats(), ())
        self._durations: tuple[float, ...] = ()
        self._pid = os.getpid()
        # A daemon: Python would join other threads before the exit handler that ends this one.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # For callers, on any thread

    def submit(self, wanted: TextRequest, sink: Callable[[Any], None]) -> Generation:
        """Queue a request. Raises ClosedError after `close`, QueueFullError."""
        job = Generation(wanted, sink, self._engine.target.n_ctx)
        self._put(job, self.max_queue)
        return job

    def stream(self, wanted: TextRequest) -> Iterator[Any]:
        """The chunks of a request as they come. Closing the iterator cancels it and waits."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        yield from self._items(self.submit(wanted, items.put), items)

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on the engine's thread while no sequence is running; returns its value."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        task = Task(work, items.put)
        self._put(task, None)
        result: T
        (result,) = self._items(task, items)
        return result

    @property
    def n_waiting(self) -> int:
        """Requests without a slot."""
        return max(self._n_submitted - self._n_ended - len(self._running), 0)

    def totals(self) -> tuple[int, Stats]:
        """The number of ended requests, and the cost of these and the running ones together."""
        n, ended, at_work = self._books
        return n, Stats.sum([ended, *at_work])

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the thread, and not one that was forked from it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Cancel running requests, refuse waiting ones, end the thread. Safe to call again."""
        if not self.is_here:
            return
        with self._lock:
            self._closed = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self) -> None:
        """End the thread once nothing is waiting or running.

        Safe in a finalizer, which may run on any thread and at any point.
        """
        self._inbox.put(None)

    def _put(self, job: Job, max_queue: int | None) -> None:
        if not self.is_here:  # where the lock may be held by a thread that does not exist
            raise ClosedError(
                f"this model was loaded by process {self._pid}, of which this one is a fork; "
                "load a model in each process, or start processes by spawn"
            )
        with self._lock:
            if self._closed:
                raise ClosedError("this model is closed; load it again")
            n = self._n_submitted - self._n_ended - self._n_slots
            full = max_queue is not None and n >= max_queue
            if not full:
                self._n_submitted += 1
                self._inbox.put(job)
        if full:
            seconds = scheduler.retry_after(self._durations, self._n_slots)
            raise QueueFullError(
                f"{max_queue} requests are waiting already; try again in {seconds} s", seconds
            )

    def _items(self, job: Job, items: queue.SimpleQueue[Any]) -> Iterator[Any]:
        try:
            while (item := items.get()) is not job:
                yield item
            if job.error is not None:
                raise job.error
        finally:
            job.cancel()
            if threading.current_thread() is not self._thread:
                job.wait()

    # The thread

    def _run(self) -> None:
        try:
            while self._receive():
                self._leave_queue()
                self._enter()
                self._refuse_overdue()
                self._step()
        finally:
            with self._lock:  # who finds it open has put its job into the inbox by then
                self._closed = True
            self._end_all()

    def _receive(self) -> bool:
        """Take in submitted jobs, and wait for them if there is nothing to do. False: the thread
        must end.

        While it waits, the thread refers to no request. A request refers to the model, which would
        then never be freed.
        """
        while not self._closed:
            idle = not self._waiting and not self._running
            if idle and self._stopping:
                return False
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if job is None:
                self._stopping = True
            else:
                self._waiting.append(job)
            del job
        return False

    def _leave_queue(self) -> None:
        """Remove waiting jobs that need no slot any more."""
        for job in [job for job in self._waiting if job.is_done_waiting()]:
            self._waiting.remove(job)
            self._end(job)
            self._engine.prefix_cache.store.forget_ahead()  # it may have been for this one

    def _refuse_overdue(self) -> None:
        """Remove jobs that have waited too long. Those for which a slot was free have begun."""
        now = time.monotonic()
        for job in [job for job in self._waiting if job.ticket.is_overdue(now)]:
            self._waiting.remove(job)
            seconds = now - job.waits_since
            self._end(job, QueueTimeoutError(f"no slot was free for {seconds:.3g} s"))

    def _enter(self) -> None:
        """Begin jobs from the head of the queue, as long as there is room."""
        if not self._waiting or len(self._running) == self._n_slots:
            return
        n_ctx = self._engine.target.n_ctx
        free = self._engine.target.n_ctx_all - sum(job.cells(n_ctx) for job in self._running)
        tickets = [job.ticket for job in self._waiting]
        n = scheduler.n_to_begin(tickets, len(self._running), self._n_slots, free)
        for _ in range(n):
            job = self._waiting.popleft()
            try:
                if self._running and not self._is_ready(job):
                    self._waiting.appendleft(job)
                    return
                self._begin(job)
            except BaseException as error:
                self._end(job, error)

    def _is_ready(self, job: Job) -> bool:
        """Whether a job begins without waiting for the disk, which would keep the running ones."""
        if not isinstance(job, Generation):
            return True
        text = job.sequence.text if job.sequence else job.wanted.request.prompt
        return self._engine.is_at_hand(job.wanted.request, text)

    def _begin(self, job: Job) -> None:
        if isinstance(job, Generation):
            if job.sequence is None:
                job.begin(self._engine.begin(job.wanted.request))
            else:
                self._engine.resume(job.sequence)
                job.begin(job.sequence)
            self._running.append(job)
            n, ended, _ = self._books
            self._books = (n, ended, self._running_stats())
        elif isinstance(job, Task):
            job.put(job.work())
            self._end(job)

    def _step(self) -> None:
        """Run one step of all sequences, and hand out the new tokens."""
        for job in list(self._running):
            job.check_limits()
            if job.is_over:
                self._leave(job)
        self._make_room()
        if not self._running:
            return
        try:
            self._engine.step([job.running for job in self._running])
        except BaseException as error:
            for job in list(self._running):
                self._leave(job, error)
        for job in list(self._running):
            if job.is_over:
                self._leave(job)
        if not self._engine.meter.has_untold:
            self._deliver()

    def _deliver(self) -> None:
        """Hand out the new tokens."""
        for job in self._running:
            if not job.is_over:  # else it has them with its result
                job.deliver()

    def _make_room(self) -> None:
        """Suspend the sequences that began last, until there are enough cells for the others."""
        while len(self._running) > 1:
            if self._engine.has_room([job.running for job in self._running]):
                return
            self._engine.meter.tell()  # it gets the tokens that it has
            job = self._running.pop()
            try:
                self._engine.suspend(job.running)
            except BaseException as error:
                self._end(job, error)
            else:
                job.wait_again(self._engine.target.n_ctx)
                self._waiting.appendleft(job)

    def _leave(self, job: Generation, error: BaseException | None = None) -> None:
        """Give back the slot of a sequence that has ended or failed, then tell its caller."""
        self._running.remove(job)
        if job.begun_at is not None:
            seconds = time.monotonic() - job.begun_at
            self._durations = (*self._durations, seconds)[-_REMEMBERED:]
        self._end(job, error or job.running.error)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        self._n_ended += 1
        if isinstance(job, Generation):
            if job.sequence is not None:
                try:
                    self._engine.end(job.sequence)
                except BaseException as raised:
                    error = error or raised
            n, ended, _ = self._books
            self._books = (n + 1, Stats.sum([ended, job.stats]), self._running_stats())
            try:
                if error is None:
                    job.conclude()
            except BaseException as raised:
                error = raised
        job.finish(error)

    def _running_stats(self) -> tuple[Stats, ...]:
        return tuple(job.stats for job in self._running)

    def _end_all(self) -> None:
        """Cancel running requests, refuse waiting ones."""
        for job in list(self._running):
            job.cancel()
            job.check_limits()
            self._leave(job)
        while not self._inbox.empty():
            late = self._inbox.get()
            if late is not None:
                self._waiting.append(late)
        while self._waiting:
            self._end(
                self._waiting.popleft(),
                ClosedError("the model was closed before this request's turn"),
            )
