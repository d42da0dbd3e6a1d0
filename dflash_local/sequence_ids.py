"""The branches of the sequences in llama.cpp's KV cache: which has how much of its sequence.

The first branch has what is accepted, always. The others are brought up to it when a tree needs
them, and lose what was rejected before anything else is decoded, best of all while the device is
at work on a draft: each of these looks at all cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_local import branches, seam
from dflash_local.branches import Lines

# isort: split
import llama_cpp.llama_cpp as api

_Copy = tuple[int, int, int, int]
"""From which id to which, from which position to which."""


@dataclass(frozen=True)
class _Forked:
    """A pass over a tree whose rejected rows are still there: it began at the position `begin`."""

    begin: int
    rows: Lines
    path: Sequence[int]


class SequenceIds:
    """`ids[seq]` are those of a sequence, its own number first."""

    def __init__(self, context: Any, n_seq: int, n_branches: int, *, n_swa: int) -> None:
        """`n_swa`: tokens that layers with a sliding window look back at, with the last; 0 without
        such."""
        self.ids = branches.ids_of(n_seq, n_branches)
        self._context = seam.address(context)
        self._memory = api.llama_get_memory(context)
        self._n_swa = n_swa
        self._held = [[0] * n_branches for _ in range(n_seq)]
        """By branch: the first so many tokens of its sequence; not told of the first one."""
        self._n_used = [1] * n_seq
        """Branches that may have anything."""
        self._forked: dict[int, _Forked] = {}

    def fork(self, seqs: Sequence[int], positions: Sequence[int], rows: Lines) -> Lines:
        """Before a pass over such rows, which lie on these branches of their sequences: give the
        branches what comes before. Returns llama.cpp's ids of each row."""
        before = -1
        for seq, position, row in zip(seqs, positions, rows, strict=True):
            if seq != before and len(row) > 1:  # an anchor, which lies on all branches
                seam.edit_cells(self._context, (), self._caught_up(seq, position, len(row)))
            before = seq
        ids = self.ids
        return [[ids[seq][branch] for branch in row] for seq, row in zip(seqs, rows, strict=True)]

    def settle(self, seq: int, begin: int, rows: Lines, path: Sequence[int]) -> None:
        """After such a pass: `path` are the accepted rows. `tidy` must follow."""
        if len(path) > 1:
            ids = self.ids[seq]
            api.llama_memory_seq_cp(
                self._memory, ids[rows[path[-1]][0]], ids[0], begin + 1, begin + len(path)
            )
        self._forked[seq] = _Forked(begin, rows, path)

    def tidy(self, *, ahead: bool = False) -> None:
        """Drop what was rejected. `ahead`: another tree of as many rows is likely to follow."""
        if not self._forked:
            return
        cuts: list[tuple[int, int]] = []
        copies: list[_Copy] = []
        for seq, forked in self._forked.items():
            ids, held = self.ids[seq], self._held[seq]
            kept, had = branches.n_common(forked.rows, forked.path)
            for branch in range(1, len(kept)):
                held[branch] = forked.begin + kept[branch]
                if kept[branch] < had[branch]:
                    cuts.append((ids[branch], held[branch]))
            if ahead:
                copies += self._caught_up(seq, forked.begin + len(forked.path), len(kept))
        self._forked.clear()
        seam.edit_cells(self._context, cuts, copies)

    def truncate(self, seq: int, length: int) -> bool:
        """Forget positions `length` and up. False: this model cannot, and nothing is done."""
        self.tidy()
        ids, held = self.ids[seq], self._held[seq]
        if not api.llama_memory_seq_rm(self._memory, ids[0], length, -1):
            return False
        for branch, n in enumerate(held):
            if n > length:
                api.llama_memory_seq_rm(self._memory, ids[branch], length, -1)
                held[branch] = length
        return True

    def copy(self, source: int, target: int, length: int) -> None:
        """Sequence `target`, which is empty, shares the first `length` positions of `source`."""
        api.llama_memory_seq_cp(self._memory, self.ids[source][0], self.ids[target][0], 0, length)

    def sees(self, seq: int, length: int) -> bool:
        """Whether a sequence of `length` tokens has all that the next one looks at.

        A layer with a sliding window gives the cells behind it to others, and is saved without
        them, so that rolled back a sequence may lack some.
        """
        if not self._n_swa or not length:
            return True
        return 0 <= self._first(self.ids[seq][0]) <= max(0, length + 1 - self._n_swa)

    def clear(self, seq: int) -> None:
        """Forget a sequence, whatever a failed pass has left of it."""
        self._forked.pop(seq, None)
        for id_ in self.ids[seq][: self._n_used[seq]]:
            api.llama_memory_seq_rm(self._memory, id_, -1, -1)
        self._held[seq] = [0] * len(self.ids[seq])
        self._n_used[seq] = 1

    def _caught_up(self, seq: int, length: int, n: int) -> list[_Copy]:
        """What gives the first `n` branches the first `length` tokens."""
        ids, held = self.ids[seq], self._held[seq]
        self._n_used[seq] = max(self._n_used[seq], n)
        if self._n_swa:
            for branch in range(1, n):
                if held[branch] and self._first(ids[branch]) != self._first(ids[0]):
                    # llama.cpp wants all ids of a row to begin with the same cell.
                    api.llama_memory_seq_rm(self._memory, ids[branch], -1, -1)
                    held[branch] = 0
        copies = [
            (ids[0], id_, begin, length)
            for id_, begin in zip(ids[1:n], held[1:n], strict=True)
            if begin < length
        ]
        held[1:n] = [length] * (n - 1)
        return copies

    def _first(self, id_: int) -> int:
        first: int = api.llama_memory_seq_pos_min(self._memory, id_)
        return first
