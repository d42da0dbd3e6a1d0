"""The cells that each row of a context has, where cells are given out in one order.

The attention of a row adds up its sequence's cells in their order in the cache, and llama.cpp puts
new rows into the first free cells. Once a cell between others is free, a later row of some other
sequence may go there, before its own earlier rows. Its sums then round differently than alone. So
a freed cell stays taken until the cache is packed, except for the last ones: each sequence's cells
are in the order of its tokens, whatever other sequences do. Pure: it knows only numbers.
"""

from collections.abc import Sequence

_SPARE = 256
"""Unused cells that are left alone. Without this, small caches are packed all the time."""


class CellLog:
    """The cells that were given out, from cell 0 on, and the sequences that have them."""

    def __init__(self, n_cells: int, n_seq: int) -> None:
        self.cells: list[list[int]] = [[] for _ in range(n_seq)]
        """The cells of each sequence, by position."""
        self._n_cells = n_cells
        self._owners: list[int] = []  # for each cell, how many sequences have it
        self.n_live = 0
        """Cells that some sequence has."""

    def __len__(self) -> int:
        return len(self._owners)

    def must_pack(self, n_rows: int) -> bool:
        """Whether to pack the cache before `n_rows` more: there is no room for them otherwise, or
        passes look at more unused cells than at used ones."""
        n_dead = len(self._owners) - self.n_live
        full = len(self._owners) + n_rows > self._n_cells
        return n_dead > 0 and (full or n_dead > self.n_live + _SPARE)

    def append(self, seqs: Sequence[int]) -> None:
        """Rows of these sequences took the next cells."""
        for cell, seq in enumerate(seqs, start=len(self._owners)):
            self.cells[seq].append(cell)
        self._owners += [1] * len(seqs)
        self.n_live += len(seqs)

    def share(self, source: int, target: int, length: int) -> None:
        """Sequence `target`, which is empty, takes the first `length` cells of `source`."""
        self.cells[target] = self.cells[source][:length]
        for cell in self.cells[target]:
            self._owners[cell] += 1

    def cut(self, seq: int, length: int) -> tuple[int, int]:
        """A sequence gives up positions `length` and up.

        Returns the positions, from and to, whose cells must stay taken: no other sequence has them,
        and cells after them are in use.
        """
        mine = self.cells[seq]
        given_up = mine[length:]
        del mine[length:]
        for cell in given_up:
            self._owners[cell] -= 1
        # Sequences share beginnings, so those that others have come first.
        begin = next((i for i, cell in enumerate(given_up) if not self._owners[cell]), None)
        if begin is None:
            return length, length
        end = len(given_up)
        self.n_live -= end - begin
        while end > begin and given_up[end - 1] == len(self._owners) - 1:
            self._owners.pop()
            end -= 1
        return length + begin, length + end

    def pack(self) -> None:
        """The cells in use have moved together, in their order."""
        new, n = [0] * len(self._owners), 0
        for cell, n_owners in enumerate(self._owners):
            new[cell] = n
            n += n_owners > 0
        self.cells = [[new[cell] for cell in cells] for cells in self.cells]
        self._owners = [owners for owners in self._owners if owners]
