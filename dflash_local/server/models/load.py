"""Loading one model: on a thread of its own, with its progress, its end and its failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from dflash_local.embedder import Embedder
from dflash_local.errors import ClosedError, DflashError, FileError, PairError
from dflash_local.model import Model
from dflash_local.server.http.errors import ApiError, log_crash, unavailable
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
