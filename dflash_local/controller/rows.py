"""The number of rows that a round verifies, and their division among the sequences.

A round verifies the rows that maximise

    expected tokens - rate * seconds

which, with the rate at its long-run best, maximises tokens per second (renewal theory: Ross 1970).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from math import inf
from operator import sub

import numpy as np
from numpy.typing import NDArray

HORIZON = 20
"""Rounds over which a better row count, or another shape, must earn the change of graph. With none,
or with very many, it changes too often or never, at a third of the speed at worst."""
BLEND = 0.15
"""The weight of the last round in means that stand for the next ones. With less, the usual row
count is found too late."""


class Rows:
    """Chooses for the batch of the last `price`. Counts are of drafts: rows beyond a plain pass."""

    def __init__(self, *, equal: bool = False) -> None:
        """`equal`: all sequences of a pass get as many rows, as recurrent targets want it."""
        self._equal = equal
        self.base = 0
        self.rate = 0.0
        """The tokens a second that rows must beat."""
        self._passes: Sequence[float] = ()
        self._prices: list[float] = []
        self._enough: dict[tuple[int, int, float], NDArray[np.float64]] = {}
        self._means: dict[int, list[float]] = {}  # values of the last rounds; by how many there are

    def price(self, base: int, passes: Sequence[float], rate: float) -> None:
        """A plain pass has `base` rows; one with k more takes `passes[k]` seconds. `rate`: the
        tokens a second that it must beat. The list stays as it is."""
        if passes is self._passes and (base, rate) == (self.base, self.rate):
            return
        if base != self.base:
            self._means = {}
        self.base, self.rate, self._passes, self._enough = base, rate, passes, {}
        self._prices = [rate * (seconds - passes[0]) for seconds in passes]

    def forget(self) -> None:
        """Forget the worth of the last drafts: the next ones have another shape."""
        self._means = {}

    def value(self, chances: Sequence[float]) -> float:
        """The worth in tokens of the best part of drafts with these falling chances, beside a plain
        pass."""
        return max(self._values(self._merged([list(chances)])))

    def usual(
        self, chains: Sequence[list[float]], last_rows: int | None, switch_s: float
    ) -> list[int]:
        """Rows for each sequence, its anchor included, by the falling chances of its drafts.

        `last_rows` are those of the last pass, from which to go costs `switch_s` seconds; None: any
        pass will have a new graph. The last count is kept unless another is better by more than its
        graph costs: now, to go there and back, or on average, over the rounds to come.
        """
        merged = self._merged(chains)
        values, last = self._values(merged), self._last(last_rows)
        switch = self.rate * switch_s
        means = self._blended(values)
        usual, best = means.index(max(means)), values.index(max(values))
        stay = last
        if not 0 <= last < len(values) or (means[usual] - means[last]) * HORIZON > switch:
            stay = usual
        cost = switch if stay != last else 2 * switch
        return self._shared(chains, merged, best if values[best] - values[stay] > cost else stay)

    def once(
        self, chains: Sequence[list[float]], last_rows: int | None, switch_s: float
    ) -> list[int]:
        """The same for copies alone: each round by itself. From a plain pass there is also the way
        back."""
        merged = self._merged(chains)
        values, last = self._values(merged), self._last(last_rows)
        way = self.rate * switch_s * (1 if last else 2)
        top = max(values)
        stays = 0 <= last < len(values) and top - values[last] <= way
        return self._shared(chains, merged, last if stays else values.index(top))

    def least(self, n_seqs: int, last_rows: int | None, switch_s: float) -> NDArray[np.float64]:
        """The least expected number of accepted drafts among the first k + 1 of one of `n_seqs`
        sequences, float64 by k. If all drafts of all of them stay below at each k, `once` chooses a
        plain pass; with one sequence, it does so in no other case."""
        kind = n_seqs, self._last(last_rows), switch_s
        if kind not in self._enough:
            self._enough = {kind: self._least(*kind)}
        return self._enough[kind]

    def _least(self, n_seqs: int, last: int, switch_s: float) -> NDArray[np.float64]:
        switch = self.rate * switch_s
        # After a plain pass, drafts pay the way there and back. After any other, a plain one
        # has a new graph, too.
        least = np.array(self._prices[1:]) + (0.0 if last else 2 * switch)
        if 0 < last <= len(least):
            least[last - 1] -= switch  # to stay there costs no change
        if self._equal and self.base > 1:  # one draft more of each is a row more of all in the pass
            n = self.base
            return np.array([least[k : k + n].min() for k in range(n - 1, len(least), n)]) / n_seqs
        if n_seqs == 1:
            return least
        counts = np.arange(1.0, len(least) + 1.0)
        each: NDArray[np.float64] = (least / counts).min(initial=inf) * counts
        return each

    def _last(self, rows: int | None) -> int:
        return -1 if rows is None else rows - self.base

    def _merged(self, chains: Sequence[list[float]]) -> list[float]:
        """The tokens that each further row brings, of all sequences."""
        return merged(chains, self.base if self._equal else 0)

    def _values(self, chances: Sequence[float]) -> list[float]:
        """The tokens that drafts bring, less the worth of their time, by their number."""
        return list(map(sub, accumulate(chances, initial=0.0), self._prices))

    def _blended(self, values: list[float]) -> list[float]:
        """With those of the rounds before that had as many: the ends of answers have fewer, which
        say nothing of the usual drafts."""
        means = self._means.get(len(values), values)
        blended = [mean + BLEND * (value - mean) for mean, value in zip(means, values, strict=True)]
        self._means[len(values)] = blended
        return blended

    def _shared(self, chains: Sequence[list[float]], merged: list[float], n: int) -> list[int]:
        """Rows for each sequence, its anchor included, when the `n` likeliest of all drafts are
        verified."""
        if self._equal:
            return [1 + n // self.base] * len(chains)
        if len(chains) == 1:
            return [1 + n]
        if n <= 0:
            return [1] * len(chains)
        least = merged[n - 1]
        as_likely = n - merged.index(least)  # of those that are no likelier than the last one
        widths = []
        for chain in chains:
            kept = 0
            for chance in chain:
                if chance < least or (chance == least and not as_likely):
                    break
                kept += 1
                as_likely -= chance == least
            widths.append(1 + kept)
        return widths


def merged(chains: Sequence[list[float]], n_equal: int = 0) -> list[float]:
    """The tokens that each further row brings, by all sequences' falling chances: likeliest first.

    `n_equal`: a row more of one sequence is one of all of them, so many in a pass, and the last of
    these completes the next draft of each chain; 0 if each has rows of its own.
    """
    if n_equal:
        brought: list[float] = []
        for chances in zip_longest(*chains, fillvalue=0.0):
            brought += [*[0.0] * (n_equal - 1), sum(chances)]
        return brought
    if len(chains) == 1:
        return chains[0]
    return sorted((chance for chain in chains for chance in chain), reverse=True)
