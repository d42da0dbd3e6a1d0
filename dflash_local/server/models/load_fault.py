"""Why a model could not be loaded, as its requests are told."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.errors import DflashError, FileError, PairError
from dflash_local.server.http.errors import ApiError, log_crash, unavailable
from dflash_local.server.models.source import ModelSource

_CODE = "model_load_failed"


@dataclass(frozen=True)
class LoadFault:
    """`reason` is one line without folders. `lasting`: it is the files' fault, and will stay so."""

    reason: str
    lasting: bool

    @classmethod
    def of(cls, error: BaseException, source: ModelSource) -> LoadFault:
        """What `error`, raised while `source` was loaded, says."""
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

    def error(self, name: str) -> ApiError:
        """What a request to the model of that name is answered."""
        message = f"{name} cannot be loaded: {self.reason}"
        if self.lasting:
            return ApiError(500, message, type="server_error", param="model", code=_CODE)
        return unavailable(message, code=_CODE)
