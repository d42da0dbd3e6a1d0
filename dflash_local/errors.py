"""Everything that can go wrong, sorted by its cause: the caller, a file, or the machine."""


class DflashError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(DflashError, ValueError):
    """Bad input. The message names the given value, the expected one and the remedy."""


class FileError(InputError):
    """A file is missing, unreadable, not GGUF, malformed, or not of the kind that was expected."""


class PairError(InputError):
    """Target and drafter do not fit each other; the message names the field and both values."""


class ContextFullError(InputError):
    """A prompt or a cache row does not fit the context; the message holds the numbers."""


class PromptTooLongError(ContextFullError):
    """A prompt has `n_prompt_tokens`, and the context holds `n_ctx`. `at_least`: its length alone
    tells that it has so many or more; they were not counted."""

    def __init__(
        self, message: str, n_prompt_tokens: int, n_ctx: int, *, at_least: bool = False
    ) -> None:
        super().__init__(message)
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx
        self.at_least = at_least


class GrammarError(InputError):
    """A grammar or JSON schema that cannot be read, or that an answer cannot follow."""


class BackendError(DflashError, RuntimeError):
    """llama.cpp or ggml failed at run time."""


class NotFiniteError(BackendError):
    """The target's logits are not finite numbers. Mostly its file is damaged."""


class WorkerLostError(BackendError):
    """A worker on another machine does not answer, or not any more."""


class QueueFullError(DflashError, RuntimeError):
    """The queue for slots is full. `retry_after`: seconds until a place may be free."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueTimeoutError(DflashError, TimeoutError):
    """A request waited for a slot longer than its `queue_timeout`."""


class ClosedError(DflashError, RuntimeError):
    """A model, target or drafter was used after `close`."""
