"""What can go wrong, sorted by whose hand it was: the caller's, a file's, the machine's."""

from __future__ import annotations


class DflashError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(DflashError, ValueError):
    """Bad input. The message names what was given, what was expected and what to do."""


class FileError(InputError):
    """A file is missing, unreadable, not GGUF, malformed, or of another kind than asked for."""


class PairError(InputError):
    """Target and drafter do not fit; the message names the field and both values."""


class ContextFullError(InputError):
    """A prompt or a cache row does not fit the context; the message holds the numbers."""


class GrammarError(InputError):
    """A grammar or JSON schema that cannot be read, or that an answer cannot follow."""


class BackendError(DflashError, RuntimeError):
    """llama.cpp or ggml failed at run time."""


class QueueFullError(DflashError, RuntimeError):
    """As many requests wait for a slot as may; `retry_after` are seconds until one may be free."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueTimeoutError(DflashError, TimeoutError):
    """A request waited for a slot longer than it wanted to."""


class ClosedError(DflashError, RuntimeError):
    """A model, target or drafter was used after `close`."""
