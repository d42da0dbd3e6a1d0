"""Work that a caller hands to the model's thread, and may give up on at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dflash_local.scheduler import Waiting


class Job:
    """`sink` is called on the model's thread with every item, and with the job itself at its end.

    `ticket` is what the queue knows of it. `error` is what went wrong; it is set before the job
    goes into the sink.
    """

    def __init__(self, sink: Callable[[Any], None]) -> None:
        self.ticket = Waiting(alone=True)
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self._sink = sink
        self._done = threading.Event()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.cancelled.is_set()

    def put(self, item: Any) -> None:
        """Hand an item to whoever waits. A sink that fails is gone, which cancels the job: so does
        the one of an asynchronous reader whose event loop is closed."""
        try:
            self._sink(item)
        except Exception:
            self.cancelled.set()

    def cancel(self) -> None:
        """Ask the job to end; it does within one round."""
        self.cancelled.set()

    def wait(self) -> None:
        """Until the job has ended. Not for the model's own thread."""
        self._done.wait()

    def finish(self, error: BaseException | None = None) -> None:
        """The job has ended."""
        self.error = error
        self._done.set()
        self.put(self)


class Errand(Job):
    """Work that wants the engine for itself, with no sequence in any slot."""

    def __init__(self, work: Callable[[], None], sink: Callable[[Any], None]) -> None:
        super().__init__(sink)
        self.work = work
