"""A budget for thoughts: after so many tokens of them their end is forced, as llama.cpp does it.

Its choice follows from the answer's tokens alone, so a draft changes nothing. llama.cpp
(`common/reasoning-budget.cpp`) looks for the tokens of the marks; here they are found in the text,
however it was cut into tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Rule(Protocol):
    """A rule that may forbid a drawn token. It knows the answer so far."""

    def allows(self, token: int) -> bool: ...

    def mask(self, logits: NDArray[np.float32]) -> None: ...

    def accept(self, token: int) -> None: ...

    def n_valid(self, tokens: Sequence[int]) -> int: ...


@dataclass(frozen=True)
class ThinkingBudget:
    """`n_tokens` of the thoughts with which an answer may begin, and `end`, the tokens that are
    forced then. `marks` stand around thoughts. With `is_open` the prompt ends inside of them.
    `begun` are tokens of the answer that the prompt has already."""

    n_tokens: int
    marks: tuple[bytes, bytes]
    end: tuple[int, ...]
    is_open: bool
    begun: tuple[int, ...] = ()


@dataclass(frozen=True)
class _State:
    """`tail`: the last bytes, in which a mark may have begun. `n_left`: of the budget; None before
    the thoughts. `n_forced`: the number of tokens of the end that have come."""

    tail: bytes = b""
    n_left: int | None = None
    n_forced: int = 0


class ThoughtLimit:
    """Keeps the thoughts of one answer to their budget, besides another rule."""

    def __init__(
        self, budget: ThinkingBudget, piece: Callable[[int], bytes], other: Rule | None
    ) -> None:
        """`piece` are the bytes of a token, of control tokens their names."""
        self._budget = budget
        self._piece = piece
        self._other = other
        # What binds the text from its beginning on, as a schema does, leaves no thoughts to end.
        fits = other is None or other.n_valid(budget.end) == len(budget.end)
        n_left = budget.n_tokens if budget.is_open and fits else None
        self._state: _State | None = _State(n_left=n_left)
        """None: the thoughts are over, or never began."""
        for token in budget.begun:
            self._state = self._after(self._state, token)

    def allows(self, token: int) -> bool:
        if self.forced is not None:
            return token == self.forced
        return self._other is None or self._other.allows(token)

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Leaves the tokens of the other rule. A `forced` one comes with any logit."""
        if self._other is not None:
            self._other.mask(logits)

    def accept(self, token: int) -> None:
        self._state = self._after(self._state, token)
        if self._other is not None:
            self._other.accept(token)

    def n_valid(self, tokens: Sequence[int]) -> int:
        n, state = 0, self._state
        for token in tokens:
            if self._forced(state) not in (None, token):
                break
            n, state = n + 1, self._after(state, token)
        return n if self._other is None else self._other.n_valid(tokens[:n])

    @property
    def forced(self) -> int | None:
        """The token that is forced next, unless the other rule forbids it."""
        forced = self._forced(self._state)
        if forced is None or self._other is None or self._other.allows(forced):
            return forced
        return None

    def _forced(self, state: _State | None) -> int | None:
        if state is None or state.n_left != 0 or not _is_whole(state.tail):
            return None
        return self._budget.end[state.n_forced]

    def _after(self, state: _State | None, token: int) -> _State | None:
        if state is None:
            return None
        if token == self._forced(state):
            n = state.n_forced + 1
            return replace(state, n_forced=n) if n < len(self._budget.end) else None
        opening, closing = self._budget.marks
        text = state.tail + self._piece(token)
        if state.n_left is None:
            begin = text.lstrip()
            if begin.startswith(opening):
                return _State(n_left=self._budget.n_tokens)
            return _State(begin) if opening.startswith(begin) else None
        if closing in text:
            return None
        return _State(text[-len(closing) :], max(state.n_left - 1, 0))


def _is_whole(text: bytes) -> bool:
    """Whether no character is cut at the end of UTF-8 text, whose beginning may be cut."""
    for n in range(1, min(3, len(text)) + 1):
        byte = text[-n]
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4
            return n >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            break
    return True
