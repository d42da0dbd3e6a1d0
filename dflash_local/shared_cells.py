"""How many cells of the one KV cache are in use, where slots share those of a common prefix."""

from __future__ import annotations

from collections.abc import Sequence as List


class SharedCells:
    """Which slots have cells in common: pairs of them, each time the first so many positions.

    Sharing begins with a copy and ends, from some position on, with a cut. As every slot that has
    a cell has all those before it, the cells of all slots are a tree with a path for each slot.
    """

    def __init__(self) -> None:
        self._common: dict[tuple[int, int], int] = {}  # replaced, so that any thread may read it

    def share(self, source: int, target: int, length: int) -> None:
        """Slot `target`, which is empty, takes the first `length` cells of slot `source`."""
        self.cut(target, 0)
        found = {_pair(source, target): length} if length else {}
        for (a, b), n in self._common.items():
            if source in (a, b):
                found[_pair(b if a == source else a, target)] = min(n, length)
        self._common = self._common | found

    def cut(self, slot: int, length: int) -> None:
        """A slot keeps its first `length` cells."""
        left = {pair: min(n, length) if slot in pair else n for pair, n in self._common.items()}
        self._common = {pair: n for pair, n in left.items() if n}

    def n_used(self, lengths: List[int]) -> int:
        """Cells in use, where slot i has `lengths[i]`."""
        known: dict[int, int] = {}  # of slot i, the cells that some slot before it has, too
        for (_, later), n in self._common.items():
            known[later] = max(known.get(later, 0), n)
        return sum(lengths) - sum(known.values())


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
