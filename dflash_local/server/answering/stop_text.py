"""Which stop text ended an answer."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_local.result import Result
from dflash_local.target.vocabulary import Vocabulary


def stop_text(
    vocabulary: Vocabulary, result: Result, stops: Iterable[str], *, special: bool = False
) -> str | None:
    """The one of `stops` that a result with the finish reason "stop" ended with; None where the
    model ended it. `special` says that its text has the names of control tokens."""
    if result.tokens and vocabulary.ends_text(result.tokens[-1]):
        return None
    after = vocabulary.detokenize(result.tokens, special=special)[len(result.text) :]
    return min(filter(after.startswith, stops), key=len, default=None)
