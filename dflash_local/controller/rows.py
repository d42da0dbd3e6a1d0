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


class Rows:
    """Chooses for the batch of the last `price`. Counts are of drafts: rows beyond a plain pass."""

    def __init__(self, *, equal: bool = False, pads: bool = False, few: bool = False) -> None:
        """`equal`: all sequences that draft get as many rows, for a GPU's graphs; `pads`: all of
        the pass get them, drafts or not, for recurrent targets. `few`: rows of drafts come in few
        numbers."""
        self.equal = equal or pads
        self._few = few
        self._pads = pads
        self.base = 0
        self.rate = 0.0
        """The tokens a second that rows must beat."""
        self._passes: Sequence[float] = ()
        self._prices: list[float] = []
        self._enough: dict[tuple[int, int, float], NDArray[np.float64]] = {}

    def price(self, base: int, passes: Sequence[float], rate: float) -> None:
        """A plain pass has `base` rows; one with k more takes `passes[k]` seconds. `rate`: the
        tokens a second that it must beat. The list stays as it is."""
        if passes is self._passes and (base, rate) == (self.base, self.rate):
            return
        self.base, self.rate, self._passes, self._enough = base, rate, passes, {}
        self._prices = [rate * (seconds - passes[0]) for seconds in passes]

    def value(self, chances: Sequence[float]) -> float:
        """The worth in tokens of the best part of drafts with these falling chances, beside a plain
        pass."""
        chains = [list(chances)]
        return max(self._values(merged(chains, equal=self.equal), self._each(chains)))

    def usual(
        self,
        chains: Sequence[list[float]],
        last_rows: int | None,
        switch_s: float,
        typical: Sequence[list[float]] = (),
    ) -> list[int]:
        """Rows for each sequence, its anchor included, by the falling chances of its drafts.

        `last_rows` are those of the last pass, from which to go costs `switch_s` seconds; None: any
        pass will have a new graph. The last count is kept unless another is better by more than its
        graph costs: now, to go there and back, or on average, over the rounds to come. `typical`
        are the chances of those drafts on average; empty: such as these.
        """
        brought, each = merged(chains, equal=self.equal), self._each(chains)
        values, last = self._values(brought, each), self._last(last_rows, each)
        means = values
        if typical:  # at the end of an answer, drafts are shorter; with copies, longer
            padded = [*merged(typical, equal=self.equal), *[0.0] * len(brought)]
            means = self._values(padded[: len(brought)], each)
        counts = spaced(len(values) - 1) if self._few else range(len(values))
        switch = self.rate * switch_s
        stay, best = max(counts, key=means.__getitem__), max(counts, key=values.__getitem__)
        if 0 <= last < len(values) and (means[stay] - means[last]) * HORIZON <= switch:
            stay = last
        cost = switch if stay != last else 2 * switch
        return self._shared(chains, brought, best if values[best] - values[stay] > cost else stay)

    def once(
        self, chains: Sequence[list[float]], last_rows: int | None, switch_s: float
    ) -> list[int]:
        """The same for copies alone: each round by itself. From a plain pass there is also the way
        back."""
        brought, each = merged(chains, equal=self.equal), self._each(chains)
        values, last = self._values(brought, each), self._last(last_rows, each)
        way = self.rate * switch_s * (1 if last else 2)
        top = max(values)
        stays = 0 <= last < len(values) and top - values[last] <= way
        return self._shared(chains, brought, last if stays else values.index(top))

    def least(self, n_seqs: int, last_rows: int | None, switch_s: float) -> NDArray[np.float64]:
        """The least expected number of accepted drafts among the first k + 1 of one of `n_seqs`
        sequences, float64 by k. If all drafts of all of them stay below at each k, `once` chooses a
        plain pass; with one sequence, it does so in no other case."""
        kind = n_seqs, self._last(last_rows, 1), switch_s
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
        if self._pads:
            paid: NDArray[np.float64] = least[self.base - 1 :: self.base] / n_seqs
            return paid
        if n_seqs == 1:
            return least
        counts = np.arange(1.0, len(least) + 1.0)
        each: NDArray[np.float64] = (least / counts).min(initial=inf) * counts
        return each

    def each(self, n_drafting: int, base: int) -> int:
        """The rows of a pass that one draft more takes, if so many of `base` sequences draft."""
        if self._pads:
            return base
        return max(n_drafting, 1) if self.equal else 1

    def _each(self, chains: Sequence[list[float]]) -> int:
        return self.each(sum(map(bool, chains)), self.base)

    def _last(self, rows: int | None, each: int) -> int:
        """The drafts of the last pass, if one more may have as many rows; else -1."""
        n, rest = divmod(-1 if rows is None else rows - self.base, each)
        return -1 if rest else max(n, -1)

    def _values(self, chances: Sequence[float], each: int) -> list[float]:
        """The tokens that drafts bring, less the worth of their time, by their number."""
        return list(map(sub, accumulate(chances, initial=0.0), self._prices[::each]))

    def _shared(self, chains: Sequence[list[float]], merged: list[float], n: int) -> list[int]:
        """Rows for each sequence, its anchor included, when the `n` likeliest of all drafts are
        verified."""
        if self.equal:
            return [1 + n if chain or self._pads else 1 for chain in chains]
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


def spaced(n: int) -> list[int]:
    """Of 0 to n drafts those that make 1, 2, 4, ... rows with the anchor, and n. A GPU records a
    graph for each count: of the 35B-A3B shape on an H200 that took three plain steps, and the first
    answers had counts from 4 to 16 where 8 to 16 rows were all they needed."""
    return [*((1 << i) - 1 for i in range(n.bit_length())), n]


def merged(chains: Sequence[list[float]], *, equal: bool = False) -> list[float]:
    """The tokens that each further draft brings, by the falling chances of all sequences: the
    likeliest first. `equal`: one more of each chain at once."""
    if equal:
        return list(map(sum, zip_longest(*chains, fillvalue=0.0)))
    if len(chains) == 1:
        return chains[0]
    return sorted((chance for chain in chains for chance in chain), reverse=True)
