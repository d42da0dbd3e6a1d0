"""Of what the time of a target pass tells: of its rows, of a tree, or of graphs made for it."""

from __future__ import annotations

from dflash_local.costs import Costs

_TO_MAKE = 2
"""Passes in which graphs are made: llama.cpp builds its own with the first of a kind, a GPU records
with the second what it will replay."""


class PassTimes:
    """Hands the times of passes to `Costs`, each as what it is beside the pass before.

    llama.cpp keeps its graph over passes of as many rows, all of them chains or all with trees,
    until the cache has grown by so much.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._kind = (0, False)
        self._made = 0  # passes since the last new graph, that one included
        self._extra_s = 0.0  # of those that made graphs
        self._skipped = 0
        self.fresh = False
        """Whether graphs were still made in the last pass."""

    def rows(self, *, forked: bool) -> int | None:
        """Those of the last pass, if one more, with trees or without, would have its graph."""
        rows, was_forked = self._kind
        return rows if forked == was_forked else None

    def skip(self, n_rounds: int) -> None:
        """The next time is the mean of so many passes more."""
        self._skipped = n_rounds

    def observe(
        self, n_rows: int, depth: int, seconds: float, *, forked: bool, rebuilt: bool = False
    ) -> None:
        """`rebuilt`: llama.cpp is known to have built its graph anew."""
        costs, kind = self._costs, (n_rows, forked)
        n, self._skipped = 1 + self._skipped, 0
        usual_s = costs.step_s(n_rows, depth, forked=forked)
        if rebuilt or kind != self._kind:
            self._kind, self._made, self._extra_s = kind, 0, 0.0
        self.fresh = self._made < _TO_MAKE
        if self.fresh:
            self._made += n
            self._extra_s += n * (seconds - usual_s)
            if self._made >= _TO_MAKE:
                costs.observe_switch(self._extra_s, usual_s)
        elif forked:
            costs.observe_fork(n_rows, depth, seconds)
        else:
            costs.observe_step(n_rows, depth, seconds)
