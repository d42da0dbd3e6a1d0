"""A model on its way into memory, on a thread of its own: nobody else waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

from dflash_local.errors import ClosedError
from dflash_local.model import Model
from dflash_local.server.models.source import ModelSource


class ModelLoad:
    """Begins at once. `part` of the target's weights is there, from 0 to 1. `is_alone` tells
    whether no request runs on another model."""

    def __init__(self, source: ModelSource, is_alone: Callable[[], bool]) -> None:
        self.part = 0.0
        self._source = source
        self._is_alone = is_alone
        self._stopped = threading.Event()
        self._loaded = Future[Model]()
        # It may be inside llama.cpp for minutes, which no process should have to wait for.
        self._thread = threading.Thread(
            target=self._run, name=f"dflash-local load {source.name}", daemon=True
        )
        self._thread.start()

    async def model(self) -> Model:
        """The model, once it is loaded. Raises what loading it raises."""
        return await asyncio.wrap_future(self._loaded)

    def stop(self) -> None:
        """End it as soon as it can be ended: where weights are read, and between its steps."""
        self._stopped.set()

    def end(self, limit_s: float) -> bool:
        """Close what was loaded, once the thread has ended; False where it has not in time."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return False
        if not self._loaded.cancelled() and self._loaded.exception() is None:
            self._loaded.result().close()
        return True

    def _run(self) -> None:
        self._loaded.set_running_or_notify_cancel()
        try:
            model = self._source.load(self._hear, self._is_alone)
        except BaseException as error:
            self._loaded.set_exception(error)
        else:
            self._loaded.set_result(model)

    def _hear(self, part: float) -> None:
        if self._stopped.is_set():
            raise ClosedError("the server ends")
        self.part = part
