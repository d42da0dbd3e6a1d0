"""How likely copied tokens are to be accepted, learnt from what became of all that were offered.

Each offered token is of a *kind*: one of the index's cells (how its place was found, whether other
matches agree, how much before it matches), times what the drafter thinks of it. For each kind it is
counted how often the token was right where all before it were. An offer need not be verified for
that: the target's own tokens show what it was worth. So learning costs no rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dflash_local.llama import native

N_CELLS: int = native.CopyIndex.n_cells
AGREES, DIFFERS = 1, 2
"""What a drafter thinks of a copied token: it has the same, or another. 0: it has none there."""
N_KINDS = 3 * N_CELLS

_COLD = (0.3, 0.5, 0.4, 0.5, 0.6, 0.7, 0.85, 0.93, 0.97)
"""Of a copied token before any is seen, by how much before it matches: from texts that repeat half
of their lines. Without them, the first copies of a new model are offered in vain or too late."""
_DOUBT = 4.0
"""Observations that these count for. With many more, a model that never repeats drafts in vain."""
_MEMORY = 400.0
"""Observations of a kind after which older ones fade. Without it, what a model does is never
learnt again after it has changed."""
_TIES = 8.0
"""Observations that those of other requests count for in a request. With many more, a request that
repeats nothing pays for those that do."""
_LONG = 5
"""The class of lengths from which a match is a long one: more than five tokens. Short matches come
by chance in a text that repeats nothing, so whether they mean anything is known for each request
apart from the long ones. As one, a stretch of new text would cast doubt on the copies after it."""
_SILENCE = 0.2
"""Right tokens of short matches that were expected where nothing was offered at all. A text that
repeats is seldom without an offer. With none, a text that repeats nothing has so few offers that
each of them is tried, at the price of a graph."""
_FADES = 0.97
"""Of what was expected and seen in a request, what still counts after one more token. Without
fading, a text that turns from new to copied is distrusted for as long as it was new."""


def drafter_thinks(kind: int, opinion: int) -> int:
    """The kind of a token of which a drafter has this opinion."""
    return kind % N_CELLS + opinion * N_CELLS


def _cold(kind: int) -> float:
    opinion, cell = divmod(kind, N_CELLS)
    rest, length = divmod(cell, native.CopyIndex.n_lengths)
    agreement = rest % native.CopyIndex.n_agreements
    wrong = 1.0 - _COLD[length]
    wrong *= 0.7 if agreement == 1 else 1.0
    right = (1.0 - wrong) * (0.6 if agreement == 2 else 1.0)
    if opinion == AGREES:
        return 1.0 - 0.3 * (1.0 - right)
    return right * (0.6 if opinion == DIFFERS else 1.0)


def _is_long(kind: int) -> bool:
    return kind % native.CopyIndex.n_lengths >= _LONG


class CopyPrior:
    """What a request begins with, learnt from those before it. One per model."""

    def __init__(self) -> None:
        self.tried = [_DOUBT] * N_KINDS
        self.right = [_DOUBT * _cold(kind) for kind in range(N_KINDS)]

    def learn(self, kind: int, is_right: bool) -> None:
        """What became of one token of any request."""
        tried = self.tried[kind] + 1.0
        right = self.right[kind] + is_right
        if tried > _MEMORY:
            tried, right = 0.5 * tried, 0.5 * right
        self.tried[kind], self.right[kind] = tried, right

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what was seen, by kind, without those of which nothing was."""
        seen = [kind for kind in range(N_KINDS) if self.tried[kind] != _DOUBT]
        return {str(kind): [self.right[kind], self.tried[kind]] for kind in seen}

    @classmethod
    def from_dict(cls, raw: Any) -> CopyPrior:
        """From `as_dict`. Raises ValueError when it is not that."""
        prior = cls()
        try:
            for key, (right, tried) in raw.items():
                kind = int(key)
                numbers = float(right), float(tried)
                if not (0 <= kind < N_KINDS and 0 <= numbers[0] <= numbers[1] < math.inf):
                    raise ValueError(key)
                prior.right[kind], prior.tried[kind] = numbers
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"no chances of copies: {error!r}") from None
        return prior


class CopyChances:
    """What is known of one request's copies."""

    def __init__(self, prior: CopyPrior) -> None:
        self._prior = prior
        self._tried: dict[int, float] = {}
        self._right: dict[int, float] = {}
        self._known: dict[int, float] = {}
        # For short and for long matches: right ones that were expected, and that there were.
        self._expected = [1.0, 1.0]
        self._seen = [1.0, 1.0]

    def each(self, kinds: Sequence[int]) -> list[float]:
        """The chance of each token that it is right where all before it are."""
        known = self._known
        for kind in set(kinds).difference(known):
            known[kind] = self._chance(kind)
        trust = [min(s / e, 1.0) for s, e in zip(self._seen, self._expected, strict=True)]
        return [known[kind] * trust[_is_long(kind)] for kind in kinds]

    def learn(self, kind: int, is_right: bool) -> None:
        """What became of one token of this request."""
        self._expect(_is_long(kind), self._chance(kind), is_right)
        self._tried[kind] = self._tried.get(kind, 0.0) + 1.0
        self._right[kind] = self._right.get(kind, 0.0) + is_right
        self._prior.learn(kind, is_right)
        self._known[kind] = self._chance(kind)

    def learn_silence(self, n: int) -> None:
        """So many tokens were written that no copy was offered for."""
        for _ in range(n):
            self._expect(False, _SILENCE, False)

    def _expect(self, group: bool, chance: float, is_right: bool) -> None:
        # One right token of one is taken as seen, so that a group is never lost for good.
        self._expected[group] = 1.0 + _FADES * (self._expected[group] - 1.0) + chance
        self._seen[group] = 1.0 + _FADES * (self._seen[group] - 1.0) + is_right

    def _chance(self, kind: int) -> float:
        prior = self._prior
        others = prior.right[kind] / prior.tried[kind]
        own = self._right.get(kind, 0.0) + _TIES * others
        # Never certain: a long copy then counts for what it can bring, and no more.
        return min(own / (self._tried.get(kind, 0.0) + _TIES), 0.999)
