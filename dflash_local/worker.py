"""One thread owns the model; others hand it jobs, and each job can be cancelled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dflash_local.errors import ClosedError


class Job:
    """Work for the owner's thread. `sink` is called there with every item, then with the job.

    `error` is what the work raised; it is set before the job itself goes into the sink.
    """

    def __init__(self, work: Callable[[Job], None], sink: Callable[[Any], None]) -> None:
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        self._sink = sink
        self._done = threading.Event()
        self._thread: int | None = None

    def put(self, item: Any) -> None:
        """Hand an item to whoever waits. A sink that is gone cancels the job."""
        try:
            self._sink(item)
        except RuntimeError:  # the event loop of an asynchronous reader is closed
            self.cancelled.set()

    def cancel(self) -> None:
        """Ask the job to end; it does within one round."""
        self.cancelled.set()

    def wait(self) -> None:
        """Until the job has ended. Returns at once on the owner's own thread."""
        if threading.get_ident() != self._thread:
            self._done.wait()

    def run(self) -> None:
        self._thread = threading.get_ident()
        try:
            self._work(self)
        except BaseException as error:
            self.error = error
        self.finish()

    def finish(self) -> None:
        self._done.set()
        self.put(self)


class Worker:
    """Runs jobs one after the other on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._current: Job | None = None
        self._lock = threading.Lock()
        self._closed = False
        # A daemon, since Python joins other threads before the exit handler that ends this one.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Job], None], sink: Callable[[Any], None]) -> Job:
        """Queue a job. Raises ClosedError after `close`."""
        job = Job(work, sink)
        with self._lock:
            if self._closed:
                raise ClosedError("this model is closed; load it again")
            self._jobs.put(job)
        return job

    def stream(self, work: Callable[[Job], None]) -> Iterator[Any]:
        """The items of a job as they come. Closing the iterator cancels the job and waits."""
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        job = self.submit(work, items.put)
        try:
            while (item := items.get()) is not job:
                yield item
            if job.error is not None:
                raise job.error
        finally:
            job.cancel()
            job.wait()

    def close(self) -> None:
        """Cancel what runs, drop what waits, end the thread. Safe to call again."""
        with self._lock:
            self._closed = True
            current = self._current
        if current is not None:
            current.cancel()
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stop(self) -> None:
        """End the thread when it has done what waits. For when nobody is left to hand it work, and
        safe in a finalizer, which may run on any thread and at any point."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            # While it waits for the next, the thread keeps nothing of this one: a job holds the
            # model, which would never be freed.
            del job
        while not self._jobs.empty():  # queued between close and now
            job = self._jobs.get()
            if job is not None:
                self._refuse(job)

    def _do(self, job: Job) -> None:
        with self._lock:
            closed = self._closed
            self._current = None if closed else job
        if closed:
            self._refuse(job)
            return
        job.run()
        with self._lock:
            self._current = None

    @staticmethod
    def _refuse(job: Job) -> None:
        job.error = ClosedError("the model was closed before this request's turn")
        job.finish()
