"""One thread owns the model. It runs as many requests at once as there are slots."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from dflash_local import scheduler
from dflash_local.answer import Answer, Order
from dflash_local.engine import Engine
from dflash_local.errors import ClosedError, QueueFullError, QueueTimeoutError
from dflash_local.job import Errand, Job
from dflash_local.stats import Stats

_REMEMBERED = 32
"""Requests that ended lately, whose durations tell how long others will take."""


class Batcher:
    """Continuous batching: requests join and leave between rounds.

    Each step of its loop takes in what callers have handed it, lets begin who can, takes the engine
    a step further for all sequences at once, and hands out what is new. `scheduler` decides who.
    The thread takes no lock, so no caller can hold it up, nor a finalizer that runs in one.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.max_queue: int | None = None
        """How many requests may wait beside those that run; None: any number."""
        self._engine = engine
        self._n_slots = len(engine.slots)
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of those who submit
        self._closed = False
        self._n_submitted = 0
        # The thread's own. Others may read what is replaced as a whole.
        self._waiting: deque[Job] = deque()
        self._running: list[Answer] = []
        self._stopping = False
        self._n_ended = 0
        self._books: tuple[int, Stats, tuple[Stats, ...]] = (0, Stats(), ())
        self._durations: tuple[float, ...] = ()
        # A daemon, since Python joins other threads before the exit handler that ends this one.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # For callers, on any thread

    def submit(self, order: Order, sink: Callable[[Any], None]) -> Answer:
        """Queue a request. Raises ClosedError after `close`, QueueFullError."""
        answer = Answer(order, sink, self._engine.target.n_ctx)
        self._put(answer, self.max_queue)
        return answer

    def stream(self, order: Order) -> Iterator[Any]:
        """The chunks of a request as they come. Closing the iterator cancels it and waits."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        yield from self._items(self.submit(order, items.put), items)

    def run(self, work: Callable[[], None]) -> None:
        """Do something with the engine, on its thread, while no sequence is at work."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        errand = Errand(work, items.put)
        self._put(errand, None)
        for _ in self._items(errand, items):
            pass

    @property
    def n_waiting(self) -> int:
        """Requests without a slot."""
        return max(self._n_submitted - self._n_ended - len(self._running), 0)

    def totals(self) -> tuple[int, Stats]:
        """How many requests have ended, and what they and those at work have cost together."""
        n, ended, at_work = self._books
        return n, Stats.sum([ended, *at_work])

    def close(self) -> None:
        """Cancel what runs, refuse what waits, end the thread. Safe to call again."""
        with self._lock:
            self._closed = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self) -> None:
        """End the thread when it has done what waits. For when nobody is left to hand it work, and
        safe in a finalizer, which may run on any thread and at any point."""
        self._inbox.put(None)

    def _put(self, job: Job, max_queue: int | None) -> None:
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
                self._step()
        finally:
            self._closed = True
            self._end_all()

    def _receive(self) -> bool:
        """Take in what has been submitted; wait for it where there is nothing to do. False: no more
        is to be done. While it waits, the thread keeps nothing of a request, and so of the model,
        which would never be freed."""
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
        """Those who have waited too long, and those whom nobody waits for any more."""
        if not self._waiting:
            return
        late = scheduler.overdue([job.ticket for job in self._waiting], time.monotonic())
        gone = [i for i, job in enumerate(self._waiting) if job.given_up]
        leaving = [self._waiting[i] for i in sorted({*late, *gone})]
        for job in leaving:
            self._waiting.remove(job)
            if isinstance(job, Answer) and not job.given_up:
                seconds = time.monotonic() - job.waits_since
                self._end(job, QueueTimeoutError(f"no slot was free for {seconds:.3g} s"))
            else:
                self._end(job)

    def _enter(self) -> None:
        """Those at the head of the queue, as far as there is room for them."""
        if not self._waiting or len(self._running) == self._n_slots:
            return
        n_ctx = self._engine.target.n_ctx
        free = n_ctx - sum(answer.cells(n_ctx) for answer in self._running)
        tickets = [job.ticket for job in self._waiting]
        n = scheduler.n_to_begin(tickets, len(self._running), self._n_slots, free)
        for _ in range(n):
            job = self._waiting.popleft()
            try:
                self._begin(job)
            except BaseException as error:
                self._end(job, error)

    def _begin(self, job: Job) -> None:
        if isinstance(job, Answer):
            if job.sequence is None:
                job.begin(self._engine.begin(job.order.request))
            else:
                self._engine.resume(job.sequence)
                job.begin(job.sequence)
            self._running.append(job)
            n, ended, _ = self._books
            self._books = (n, ended, self._at_work())
        elif isinstance(job, Errand):
            job.work()
            self._end(job)

    def _step(self) -> None:
        """A step of all sequences, and what is new in them to those who wait for it."""
        for answer in list(self._running):
            answer.heed()
            if answer.is_over:
                self._leave(answer)
        self._make_room()
        if not self._running:
            return
        try:
            self._engine.step([answer.at_work for answer in self._running])
        except BaseException as error:
            for answer in list(self._running):
                self._leave(answer, error)
        for answer in list(self._running):
            if answer.is_over:
                self._leave(answer)
            else:
                answer.deliver()

    def _make_room(self) -> None:
        """Where sequences have outgrown the cells, the last ones step aside."""
        while len(self._running) > 1:
            if self._engine.has_room([answer.at_work for answer in self._running]):
                return
            answer = self._running.pop()
            try:
                self._engine.suspend(answer.at_work)
            except BaseException as error:
                self._end(answer, error)
            else:
                answer.step_aside(self._engine.target.n_ctx)
                self._waiting.appendleft(answer)

    def _leave(self, answer: Answer, error: BaseException | None = None) -> None:
        """A sequence has ended, or failed: its slot is free before anyone hears of it."""
        self._running.remove(answer)
        try:
            self._engine.end(answer.at_work)
        except BaseException as raised:
            error = error or raised
        if answer.begun_at is not None:
            seconds = time.monotonic() - answer.begun_at
            self._durations = (*self._durations, seconds)[-_REMEMBERED:]
        self._end(answer, error or answer.at_work.error)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """The last that is heard of a job."""
        self._n_ended += 1
        if isinstance(job, Answer):
            if job.sequence is not None:
                job.sequence.sampler.close()
            n, ended, _ = self._books
            self._books = (n + 1, Stats.sum([ended, job.stats]), self._at_work())
            try:
                if error is None:
                    job.conclude()
            except BaseException as raised:
                error = raised
        job.finish(error)

    def _at_work(self) -> tuple[Stats, ...]:
        return tuple(answer.stats for answer in self._running)

    def _end_all(self) -> None:
        """Cancel what runs, refuse what waits."""
        for answer in list(self._running):
            answer.cancel()
            answer.heed()
            self._leave(answer)
        while not self._inbox.empty():
            job = self._inbox.get()
            if job is not None:
                self._waiting.append(job)
        while self._waiting:
            job = self._waiting.popleft()
            self._end(job, ClosedError("the model was closed before this request's turn"))
