"""The number of rows that a round verifies, and their division among the sequences.

A round verifies the rows that maximise

    expected tokens - rate * seconds

which, with the rate at its long-run best, maximises tokens per second (renewal theory: Ross 1970).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from math import inf
from operator import sub

import numpy as np
from numpy.typing import NDArray


class Rows:
    """Chooses for the batch of the last `price`. Counts are of drafts: rows beyond a plain pass."""

    def __init__(self, *, equal: bool = False, pads: bool = False, few: bool = False) -> None:
        """`equal`: all sequences that draft get as many rows, for a GPU's graphs; `pads`: all of
        the pass get them, drafts or not, for recurrent targets. `few`: rows of drafts come in few
        numbers."""
        self._equal = equal or pads
        self._pads = pads
        self._few = few
        self.price(0, [0.0], 0.0, 0.0)

    def price(self, base: int, passes: Sequence[float], rate: float, switch_s: float) -> None:
        """A plain pass has `base` rows; one with k more takes `passes[k]` seconds. `rate`: the
        tokens a second that it must beat. A pass with other rows than the last one takes `switch_s`
        seconds more."""
        self._base, self.rate, self._switch = base, rate, rate * switch_s
        self._prices = [rate * (seconds - passes[0]) for seconds in passes]
        self._enough: dict[tuple[int, int], NDArray[np.float64]] = {}

    def choose(
        self, chains: Sequence[list[float]], last_rows: int | None, usual: int = 0
    ) -> list[int]:
        """Rows for each sequence, its anchor included, by the falling chances of its drafts.

        `last_rows` are those of the last pass; None: any pass will have a new graph. The rounds to
        come will have `usual` drafts again: another count costs a new graph for them, too.
        """
        brought, each = self.merged(chains), self.each(sum(map(bool, chains)))
        values = self._values(brought, each)
        usual, last = min(usual, len(values) - 1), self._last(last_rows, each)
        ways = [usual, max(self.counts(len(values)), key=values.__getitem__)]
        if 0 <= last < len(values):
            ways.append(last)
        n = max(ways, key=lambda k: values[k] - self._switch * ((k != last) + (k != usual)))
        return self._shared(chains, brought, n)

    def least(self, n_seqs: int, last_rows: int | None) -> NDArray[np.float64]:
        """The least expected number of accepted drafts among the first k + 1 of one of `n_seqs`
        sequences, float64 by k. If all drafts of all of them stay below at each k, `choose` takes a
        plain pass; with one sequence, it does so in no other case."""
        last = self._last(last_rows, 1)
        kind = n_seqs, last
        if kind not in self._enough:
            # Beside a plain pass, drafts pay the way back, and after one the way there as well.
            least = np.array(self._prices[1:]) + self._switch * (1 if last else 2)
            if 0 < last <= len(least):
                least[last - 1] -= self._switch  # to stay there costs no change
            if self._pads:
                least = least[self._base - 1 :: self._base] / n_seqs
            elif n_seqs > 1:
                counts = np.arange(1.0, len(least) + 1.0)
                least = (least / counts).min(initial=inf) * counts
            self._enough[kind] = least
        return self._enough[kind]

    def value(self, chances: list[float]) -> float:
        """The worth in tokens of the best part of a draft with these falling chances, beside a
        plain pass."""
        return max(self._values(chances, self.each(1)))

    def each(self, n_drafting: int) -> int:
        """The rows of a pass that one draft more takes, if so many sequences draft."""
        if self._pads:
            return self._base
        return max(n_drafting, 1) if self._equal else 1

    def counts(self, n: int) -> Iterable[int]:
        """The numbers of drafts below `n` that may be verified."""
        return spaced(n - 1) if self._few else range(n)

    def merged(self, chains: Sequence[list[float]]) -> list[float]:
        """The tokens that each further draft brings, by the falling chances of all sequences: the
        likeliest first, or one more of each chain at once."""
        if len(chains) == 1:
            return chains[0]
        if self._equal:
            return list(map(sum, zip_longest(*chains, fillvalue=0.0)))
        return sorted((chance for chain in chains for chance in chain), reverse=True)

    def _last(self, rows: int | None, each: int) -> int:
        """The drafts of the last pass, if one more may have as many rows; else -1."""
        n, rest = divmod(-1 if rows is None else rows - self._base, each)
        return -1 if rest else max(n, -1)

    def _values(self, chances: Sequence[float], each: int) -> list[float]:
        """The tokens that drafts bring, less the worth of their time, by their number."""
        return list(map(sub, accumulate(chances, initial=0.0), self._prices[::each]))

    def _shared(self, chains: Sequence[list[float]], merged: list[float], n: int) -> list[int]:
        """Rows for each sequence, its anchor included, when the `n` likeliest of all drafts are
        verified."""
        if self._equal:
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
