"""What the answers of one request came to, for its line in the log and for the metrics.

Whoever generates for a request is a task of it, so that a context variable finds its tally.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from dflash_local.result import Result


@dataclass
class Tally:
    """Finished answers of one request."""

    answers: list[tuple[str, Result]] = field(default_factory=list)
    """Each with the name of its model."""

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompts; one with several answers counts for each."""
        return sum(result.stats.prompt_tokens for _, result in self.answers)

    @property
    def n_emitted(self) -> int:
        """Tokens of the answers."""
        return sum(len(result.tokens) for _, result in self.answers)


_current: ContextVar[Tally | None] = ContextVar("tally", default=None)


def open_tally() -> Tally:
    """The tally of the request that this task begins to answer."""
    tally = Tally()
    _current.set(tally)
    return tally


def record(name: str, result: Result) -> None:
    """Count an answer of the model of that name for the request that this task belongs to, if it
    belongs to one."""
    tally = _current.get()
    if tally is not None:
        tally.answers.append((name, result))
