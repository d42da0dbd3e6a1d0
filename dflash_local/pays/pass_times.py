"""Of what the time of a target pass tells: of its rows, of a tree, or of graphs made for it."""

from __future__ import annotations

from dflash_local.draft.shape import ShapeName
from dflash_local.pays.costs import Costs

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
        self._kind: tuple[int, ShapeName] = (0, "chain")
        self._made = 0  # passes since the last new graph, that one included
        self._extra_s = 0.0  # of those that made graphs
        self._skipped = 0
        self.fresh = False
        """Whether graphs were still made in the last pass."""

    def rows(self, shape: ShapeName) -> int | None:
        """Those of the last pass, if one more over drafts of that shape would have its graph."""
        rows, last_shape = self._kind
        return rows if shape == last_shape else None

    def skip(self, n_rounds: int) -> None:
        """The next time is the mean of so many passes more."""
        self._skipped = n_rounds

    def observe(
        self,
        n_rows: int,
        depth: int,
        seconds: float,
        shape: ShapeName = "chain",
        *,
        rebuilt: bool = False,
    ) -> None:
        """`rebuilt`: llama.cpp is known to have built its graph again."""
        costs, kind = self._costs, (n_rows, shape)
        n, self._skipped = 1 + self._skipped, 0
        usual_s = costs.step_s(n_rows, depth, shape)
        if rebuilt or kind != self._kind:
            self._kind, self._made, self._extra_s = kind, 0, 0.0
        self.fresh = self._made < _TO_MAKE
        if self.fresh:
            self._made += n
            self._extra_s += n * (seconds - usual_s)
            if self._made >= _TO_MAKE:
                costs.observe_switch(self._extra_s, usual_s)
        else:
            costs.observe_step(n_rows, depth, seconds, shape)
