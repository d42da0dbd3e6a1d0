"""Of what the time of a target pass tells: of its rows, of a new graph, or of a tree."""

from __future__ import annotations

from dflash_local.costs import Costs

_TO_CAPTURE = 3
"""Passes of another width that make graphs: a GPU captures with the second and adopts it then."""


class PassTimes:
    """Hands the times of passes to `Costs`, each as what it is beside the pass before.

    llama.cpp keeps its graph over passes of as many rows, all of them chains or all with trees.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._rows = 0
        self._forked = False
        self._fresh = 0
        self._skipped = 0

    @property
    def fresh(self) -> bool:
        """Whether graphs were still made in the last pass."""
        return self._fresh > 0

    def rows(self, *, forked: bool) -> int | None:
        """Those of the last pass, if one more, with trees or without, would have its graph."""
        return self._rows if forked == self._forked else None

    def skip(self, n_rounds: int) -> None:
        """The next time is the mean of so many passes more."""
        self._skipped = n_rounds

    def observe(self, n_rows: int, depth: int, seconds: float, *, forked: bool) -> None:
        costs = self._costs
        known = (n_rows, forked) == (self._rows, self._forked)
        self._fresh = max(self._fresh - 1, 0) if known else _TO_CAPTURE
        if forked:
            if not known:
                costs.observe_switch(n_rows, depth, seconds - costs.fork_s)
            else:  # at first a GPU may still be making its graph, which is the switch's matter
                costs.observe_fork(n_rows, depth, seconds - costs.switch_s * self.fresh)
        elif known:
            costs.observe_step(n_rows, depth, seconds)
        elif self._skipped:
            costs.observe_step(n_rows, depth, seconds - costs.switch_s / (self._skipped + 1))
        else:
            costs.observe_switch(n_rows, depth, seconds)
        self._rows, self._forked, self._skipped = n_rows, forked, 0
