"""How many rows a round verifies, and which sequences they go to.

A round verifies the rows that maximise

    expected tokens - rate * seconds

which, with the rate at its long-run best, maximises tokens per second (renewal theory: Ross 1970).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub

from dflash_local.draft.shape import ShapeName

_HORIZON = 24
"""Rounds over which a better row count must earn the change of graph. With none, or with very many,
the row count changes too often or never, at a third of the speed at worst."""
_BLEND = 0.15
"""Of the last round's values in their mean. With less, the usual row count is found too late."""


class RowChoice:
    """Chooses for the batch of the last `price`, and keeps to a row count where graphs are dear."""

    def __init__(self) -> None:
        self._kind: tuple[int, ShapeName] = (0, "chain")
        self.rate = 0.0
        """The tokens a second that rows must beat."""
        self._plain_price = 0.0
        self._prices: list[float] = []
        self._values: dict[int, list[float]] = {}
        """By row count, blended over the rounds of this batch; by how many row counts there are."""

    def price(
        self, base: int, passes: Sequence[float], rate: float, shape: ShapeName = "chain"
    ) -> None:
        """A plain pass has `base` rows; one with k more takes `passes[k]` seconds. `rate`: the
        tokens a second that it must beat."""
        if (base, shape) != self._kind:
            self._values = {}
        self._kind, self.rate = (base, shape), rate
        self._plain_price = rate * passes[0]
        self._prices = [rate * (seconds - passes[0]) for seconds in passes]

    def value(self, chances: Sequence[float]) -> float:
        """What the best part of drafts with these falling chances is worth, in tokens, beside a
        plain pass."""
        total: float = max(map(sub, accumulate(chances, initial=0.0), self._prices))
        return total

    def widths(
        self,
        chains: Sequence[list[float]],
        last_rows: int | None,
        switch_s: float,
        budget: float | None = None,
    ) -> list[int]:
        """Rows for each sequence, its anchor included, by the falling chances of its drafts.

        `last_rows` are those of the last pass, from which to go costs `switch_s` seconds; None: any
        pass will have a new graph. `budget`, for a probe: the plain rounds that may be lost, come
        what may.
        """
        if len(chains) == 1:
            return [1 + self._best(chains[0], last_rows, switch_s, budget)]
        merged = sorted((chance for chain in chains for chance in chain), reverse=True)
        left = self._best(merged, last_rows, switch_s, budget)
        if left == 0:
            return [1] * len(chains)
        least = merged[left - 1]
        as_likely = left - merged.index(least)  # of those that are no likelier than the last one
        widths = []
        for chain in chains:
            n = 0
            for chance in chain:
                if chance < least or (chance == least and not as_likely):
                    break
                n += 1
                as_likely -= chance == least
            widths.append(1 + n)
        return widths

    def _best(
        self, chances: list[float], last_rows: int | None, switch_s: float, budget: float | None
    ) -> int:
        """How many drafts to verify, of all sequences; `chances` fall.

        The last row count is kept unless another is better by more than its graph costs: now, to
        go there and back, or on average, over the rounds to come.
        """
        prices = self._prices
        if budget is not None:
            most = self._plain_price * max(budget, 1.0)
            chances = chances[: max(k for k, price in enumerate(prices) if price <= most)]
        values = list(map(sub, accumulate(chances, initial=0.0), prices))
        switch = self.rate * switch_s
        top = max(values)
        best = values.index(top)
        means = self._blended(values)
        if budget is not None:
            return best if top > switch else 0
        last = -1 if last_rows is None else last_rows - self._kind[0]
        if not 0 <= last < len(values):
            return best
        usual = means.index(max(means))
        stay = last
        if (means[usual] - means[last]) * _HORIZON > switch:
            stay = usual
        cost = switch if stay != last else 2 * switch
        return best if top - values[stay] > cost else stay

    def _blended(self, values: list[float]) -> list[float]:
        """With those of the rounds before that had as many: the ends of answers have fewer, and
        copies more, which say nothing of the usual drafts."""
        means = self._values.get(len(values), values)
        blended = [mean + _BLEND * (v - mean) for mean, v in zip(means, values, strict=True)]
        self._values[len(values)] = blended
        return blended
