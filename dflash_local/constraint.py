"""What bounds the tokens of an answer: a grammar, of whichever kind, at one place of one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Which tokens may come next. It moves with `accept` alone; all else leaves it where it is.

    An end of text is allowed exactly where the text so far may end; behind it only further ones.
    Any but `close` raise GrammarError where following the grammar exceeds its bounds.
    """

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Put -inf, in place, for the tokens that may not come next; logits float32 [n_vocab].

        It may leave a few that `allows` refuses, and, where only one text can follow, of its
        spellings as tokens the usual one alone.
        """

    def accept(self, token: int) -> None:
        """Move past a token that is allowed."""

    def n_valid(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, one after the other, may come next. Nothing follows an end."""

    def close(self) -> None:
        """Free what it holds. Safe to call again."""
