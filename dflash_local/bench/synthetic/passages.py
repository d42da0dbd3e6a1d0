"""Recorded passages in random order, so that rounds get the length that is asked for."""

from __future__ import annotations

from collections import deque

import numpy as np

from dflash_local.bench.synthetic.recorded import RecordedDrafts

_STRATA = 16


class Passages:
    """Draws passages, stratified by the length of their rounds, so that the mean of a short run is
    close to that of a long one."""

    def __init__(self, recorded: RecordedDrafts, length: float, seed: int) -> None:
        """`length`: tokens of a round of whole chains. Raises InputError for an impossible one."""
        self._order = np.argsort(recorded.kept.mean(axis=1), kind="stable")
        self._shares = np.cumsum(recorded.weights(length)[self._order])
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Begin again with the first one."""
        self._random = np.random.default_rng(self._seed)
        self._next: deque[int] = deque()

    def draw(self) -> int:
        """The number of the next passage."""
        if not self._next:
            places = (np.arange(_STRATA) + self._random.random(_STRATA)) / _STRATA
            at = np.searchsorted(self._shares, places * self._shares[-1], side="right")
            self._next.extend(self._random.permutation(self._order[at]).tolist())
        return self._next.popleft()
