"""The cells of the target's cache that several slots have in common."""

from collections.abc import Sequence


class SharedCells:
    """The shared cells of each pair of slots, as a number of first positions.

    Sharing begins with a copy, and a cut ends it from some position on. A slot that has a cell also
    has all cells before it. So the cells of all slots form a tree, with a path for each slot.
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

    def n_used(self, lengths: Sequence[int]) -> int:
        """Cells in use, where slot i has `lengths[i]`."""
        known: dict[int, int] = {}  # for a slot, the most cells that it shares with an earlier one
        for (_, later), n in self._common.items():
            known[later] = max(known.get(later, 0), n)
        return sum(lengths) - sum(known.values())


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
