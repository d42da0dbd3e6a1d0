"""How many rows a round verifies, and which sequences they go to.

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

from dflash_local.draft.shape import ShapeName

HORIZON = 20
"""Rounds over which a better row count, or another shape, must earn the change of graph. With none,
or with very many, it changes too often or never, at a third of the speed at worst."""
_BLEND = 0.15
"""Of the last round's values in their mean. With less, the usual row count is found too late."""


class RowChoice:
    """Chooses for the batch of the last `price`, each round by itself: for copies, whose worth in
    one round says nothing of the next."""

    def __init__(self, *, equal: bool = False) -> None:
        """`equal`: all sequences of a pass get as many rows, as recurrent targets want it."""
        self._equal = equal
        self._kind: tuple[int, ShapeName] = (0, "chain")
        self.rate = 0.0
        """The tokens a second that rows must beat."""
        self._plain_price = 0.0
        self._passes: Sequence[float] = ()
        self._prices: list[float] = []
        self._least: dict[tuple[int, int, float], NDArray[np.float64]] = {}

    def price(
        self, base: int, passes: Sequence[float], rate: float, shape: ShapeName = "chain"
    ) -> None:
        """A plain pass has `base` rows; one with k more takes `passes[k]` seconds, infinitely many
        where such a pass is not to be chosen. `rate`: the tokens a second that it must beat. The
        list stays as it is."""
        if passes is self._passes and (base, shape) == self._kind and rate == self.rate:
            return
        self._kind, self.rate, self._passes = (base, shape), rate, passes
        self._least = {}
        self._plain_price = rate * passes[0]
        self._prices = [rate * (seconds - passes[0]) for seconds in passes]

    def value(self, chances: Sequence[float]) -> float:
        """What the best part of drafts with these falling chances is worth, in tokens, beside a
        plain pass."""
        return max(self._values(self._merged([list(chances)])))

    def widths(
        self, chains: Sequence[list[float]], last_rows: int | None, switch_s: float
    ) -> list[int]:
        """Rows for each sequence, its anchor included, by the falling chances of its drafts.

        `last_rows` are those of the last pass, from which to go costs `switch_s` seconds; None: any
        pass will have a new graph.
        """
        merged = self._merged(chains)
        last = -1 if last_rows is None else last_rows - self._kind[0]
        n = self._best(self._values(merged), last, self.rate * switch_s)
        return self._shared(chains, merged, n)

    def least(self, n_seqs: int, last_rows: int | None, switch_s: float) -> NDArray[np.float64]:
        """How much of the first k + 1 drafts of one of `n_seqs` sequences must be expected to be
        accepted, float64 by k. Where all drafts of all of them stay below at each k, `widths`
        chooses a plain pass; with one sequence, it does so in no other case."""
        last = -1 if last_rows is None else last_rows - self._kind[0]
        kind = n_seqs, last, switch_s
        if kind not in self._least:
            switch = self.rate * switch_s
            # After a plain pass, drafts pay the way there and back. After any other, a plain one
            # has a new graph, too.
            least = np.array(self._prices[1:]) + (0.0 if last else 2 * switch)
            if 0 < last <= len(least):
                least[last - 1] -= switch  # to stay there costs no change
            self._least = {kind: self._of_each(least, n_seqs)}
        return self._least[kind]

    def _of_each(self, least: NDArray[np.float64], n_seqs: int) -> NDArray[np.float64]:
        """What is enough for each of several, if it is so little that all together stay below."""
        if n_seqs == 1 and not (self._equal and self._kind[0] > 1):
            return least
        if self._equal:  # one draft more of each is a row more of all in the pass
            n = self._kind[0]
            return np.array([least[k : k + n].min() for k in range(n - 1, len(least), n)]) / n_seqs
        counts = np.arange(1.0, len(least) + 1.0)
        each: NDArray[np.float64] = (least / counts).min(initial=inf) * counts
        return each

    def _merged(self, chains: Sequence[list[float]]) -> list[float]:
        """What each row more brings, of all sequences."""
        return merged(chains, self._kind[0] if self._equal else 0)

    def _shared(self, chains: Sequence[list[float]], merged: list[float], n: int) -> list[int]:
        """Rows for each sequence, its anchor included, when `n` drafts of all are verified."""
        if self._equal:
            return [1 + n // self._kind[0]] * len(chains)
        return _shared(chains, merged, n)

    def _values(self, chances: Sequence[float]) -> list[float]:
        """By drafts that are verified: the tokens that they bring, less what their time is
        worth."""
        return list(map(sub, accumulate(chances, initial=0.0), self._prices))

    def _best(self, values: list[float], last: int, switch: float) -> int:
        """How many drafts to verify, of all sequences, after a pass with `last`: 0 after a plain
        one, -1 where any pass has a new graph. Another number costs `switch` tokens; from a plain
        pass there is also the way back."""
        top = max(values)
        way = switch if last else 2 * switch
        stays = 0 <= last < len(values) and top - values[last] <= way
        return last if stays else values.index(top)


class SteadyRowChoice(RowChoice):
    """Keeps to a row count where graphs are dear: for a drafter's drafts, of which the next ones
    are worth about as much as the last."""

    def __init__(self, *, equal: bool = False) -> None:
        super().__init__(equal=equal)
        self._means: dict[int, list[float]] = {}
        """Values by row count, blended over the rounds of this batch; by how many there are."""
        self._missed = 0.0
        """By keeping the row count in the last rounds, all of them with copies; in tokens."""

    def price(
        self, base: int, passes: Sequence[float], rate: float, shape: ShapeName = "chain"
    ) -> None:
        if (base, shape) != self._kind:
            self._means = {}
        super().price(base, passes, rate, shape)

    def probe_widths(
        self, chains: Sequence[list[float]], switch_s: float, budget: float
    ) -> list[int]:
        """The same for a probe, which may lose `budget` plain rounds, come what may. What it finds
        counts for the usual rows, too."""
        most = self._plain_price * max(budget, 1.0)
        merged = self._merged(chains)[
            : max(k for k, price in enumerate(self._prices) if price <= most)
        ]
        values = self._values(merged)
        self._blended(values)
        top = max(values)
        n = values.index(top) if top > 2 * self.rate * switch_s else 0  # there and back
        return self._shared(chains, merged, n)

    def joined_widths(
        self, chains: Sequence[list[float]], last_rows: int | None, switch_s: float
    ) -> list[int]:
        """The same for drafts that copies have joined, which say nothing of the rounds after them:
        the row count is kept until it has missed, in such rounds one after the other, what going
        there and back costs."""
        merged = self._merged(chains)
        values = self._values(merged)
        last = -1 if last_rows is None else last_rows - self._kind[0]
        top = max(values)
        self._missed += top - values[last] if 0 <= last < len(values) else inf
        n = last
        if self._missed > 2 * self.rate * switch_s:
            n, self._missed = values.index(top), 0.0
        return self._shared(chains, merged, n)

    def _best(self, values: list[float], last: int, switch: float) -> int:
        """The last row count is kept unless another is better by more than its graph costs: now, to
        go there and back, or on average, over the rounds to come."""
        self._missed = 0.0
        top = max(values)
        best = values.index(top)
        means = self._blended(values)
        usual = means.index(max(means))
        stay = last
        if not 0 <= last < len(values) or (means[usual] - means[last]) * HORIZON > switch:
            stay = usual
        cost = switch if stay != last else 2 * switch
        return best if top - values[stay] > cost else stay

    def _blended(self, values: list[float]) -> list[float]:
        """With those of the rounds before that had as many: the ends of answers have fewer, which
        say nothing of the usual drafts."""
        means = self._means.get(len(values), values)
        blended = [
            v if -inf in (v, mean) else mean + _BLEND * (v - mean)
            for mean, v in zip(means, values, strict=True)
        ]
        self._means[len(values)] = blended
        return blended


def merged(chains: Sequence[list[float]], n_equal: int = 0) -> list[float]:
    """What each row more brings, by the falling chances of all sequences: the likeliest first.

    `n_equal`: a row more of one sequence is one of all of them, so many in a pass, and the last of
    these completes the next draft of each chain; 0 where each has rows of its own.
    """
    if n_equal:
        brought: list[float] = []
        for chances in zip_longest(*chains, fillvalue=0.0):
            brought += [*[0.0] * (n_equal - 1), sum(chances)]
        return brought
    if len(chains) == 1:
        return chains[0]
    return sorted((chance for chain in chains for chance in chain), reverse=True)


def _shared(chains: Sequence[list[float]], merged: list[float], n: int) -> list[int]:
    """Rows for each sequence, its anchor included, when the `n` likeliest of all are verified."""
    if len(chains) == 1:
        return [1 + n]
    if n == 0:
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
