"""Rows that the target decodes again: how many there are, and when to be done with them.

Where a recurrent state cannot be taken back row by row, a round that rejects some of a draft leaves
its accepted rows to be decoded again in the next pass, and in those after it, until all rows of one
stay. A plain step is such a pass.
"""

from __future__ import annotations

from dflash_local.controller.costs import Costs
from dflash_local.controller.rows import BLEND

_MOST_ROUNDS = 8
"""Rounds that leave rows, at most, before one that leaves none. Only so many are looked at: beyond,
what is decoded again costs more than any draft brings."""


class Redecoded:
    """What the rounds of one engine decode again. All numbers are of all its sequences together."""

    def __init__(self, costs: Costs) -> None:
        self.now = 0
        """Rows that the round in progress decodes again."""
        self._costs = costs
        self._rows = self._verified = self._kept = self._changes = 0.0
        self._carried = self._changed = 0

    @property
    def usual(self) -> int:
        """Rows that a round with drafts costs besides those that it verifies, in the mean."""
        return round(self._rows)

    @property
    def usual_s(self) -> float:
        """Seconds that such a round takes for new graphs, in the mean: as its rows vary, so does
        their number."""
        return self._changes * self._costs.switch_s if self.usual else 0.0

    def done(self, n_rows: int) -> None:
        """So many rows were decoded again in a pass of their own."""
        self._carried += n_rows

    def observe(self, n_rows: int, n_kept: int, *, verified: bool, changed: bool = False) -> None:
        """A round had `n_rows` new rows, of which so many stay. `verified`: it had drafts.
        `changed`: its pass had another number of rows than the one before."""
        self._carried += self.now  # in a plain step, they are those of drafts before it
        self._changed += changed
        if not verified:
            return
        part = BLEND if self._verified else 1.0
        self._verified += part * (n_rows - self._verified)
        self._kept += part * (n_kept - self._kept)
        self._rows += part * (self._carried - self._rows)
        self._changes += part * (self._changed - self._changes)
        self._carried = self._changed = 0

    def most(self, base: int, depth: int, draft_s: float) -> float:
        """Rows beyond which a plain step, of `base` new rows, is better than one more draft, which
        takes `draft_s` seconds. Infinite before the first round with drafts."""
        if not self._verified:
            return float("inf")
        step_s, draft_s = self._costs.step_s, draft_s + self._costs.switch_s
        seconds, best, most = 0.0, 0.0, 0.0
        for n in range(1, _MOST_ROUNDS + 1):
            left = (n - 1) * self._kept
            seconds += draft_s + step_s(round(self._verified + left), depth)
            last_s = step_s(round(base + n * self._kept), depth) + self._costs.switch_s
            rate = (n * self._kept + base) / (seconds + last_s)
            if rate > best:
                best, most = rate, left + self._kept / 2
        return most
