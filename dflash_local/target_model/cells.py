"""The cells of llama.cpp's KV cache that belong to each sequence, and to each branch of it.

llama.cpp knows sequences by ids. A row attends to the cells that carry its first id, and llama.cpp
keeps its graph as long as the first ids of a batch's rows stay the same. So a sequence has several
ids, its *branches*. Every row of a draft tree has a branch of its own, and the rows on the way to
it carry the id of that branch, too. A chain needs only the first branch.

The first branch always has everything that was accepted. The others catch up with it when a tree
needs them. Rejected rows are removed before anything else is decoded, if possible while the device
is busy with a draft: each of these edits looks at all cells.

Where only the order of cells decides the rounding of sums, sequences keep theirs in order (see
`CellLog`). Freed cells then belong to a spare id until the cache is packed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import BackendError
from dflash_local.fit.options import MAX_IDS
from dflash_local.llama import native
from dflash_local.llama.host import host_memory
from dflash_local.llama.runtime import api
from dflash_local.target_model import sequence_state
from dflash_local.target_model.batch import Batch, Part
from dflash_local.target_model.cell_log import CellLog
from dflash_local.target_model.images import more_cells
from dflash_local.target_model.rollback import Rollback

MOST_BRANCHES, LEAST_BRANCHES = 32, 16
"""Branches of a sequence: one for each row of the widest trees that paid off anywhere (32 rows, 8B
in BF16 on an H200), and fewer if several sequences share the ids, as every pass looks at all."""

_ANCHOR = -1
_LOST = "llama.cpp could not move the cells of its cache together; load the model again"

RowBranches = list[list[int]]
"""For each row of a part, the branches that it is on, its own branch first."""

_Copy = tuple[int, int, int, int]
"""(source id, target id, first position, end position)."""


def branches_of_each(n_seq: int, n_batch: int) -> int:
    """The number of branches of each of `n_seq` sequences; 1 if there is no room for trees."""
    wanted = max(MOST_BRANCHES // n_seq, LEAST_BRANCHES)
    n = min(wanted, MAX_IDS // n_seq, n_batch // n_seq)
    return n if n > 2 else 1


def ids_of(n_seq: int, n_branches: int) -> list[list[int]]:
    """llama.cpp's ids of each sequence, [n_seq][n_branches]. The first is the sequence's number."""
    more = n_branches - 1
    return [[seq, *range(n_seq + seq * more, n_seq + (seq + 1) * more)] for seq in range(n_seq)]


def branches_of_rows(parents: Sequence[int], n_branches: int) -> RowBranches:
    """The branches of the anchor and of each node of a tree, if possible one branch per row.

    With too few branches, a row shares the branch of its first child, and llama.cpp builds its
    graph again for every new shape of tree. Raises ValueError if not even each leaf can have a
    branch of its own.
    """
    n = len(parents)
    owners: Sequence[int] = range(n)
    if n >= n_branches:
        inner = set(parents)
        owners = [node for node in range(n) if node not in inner]
        if len(owners) >= n_branches:
            raise ValueError(
                f"a tree of {len(owners)} leaves; with {n_branches} branches it can have "
                f"{n_branches - 1}"
            )
    row_branches: RowBranches = [[] for _ in range(n)]
    for branch, node in enumerate(owners, start=1):
        while node != _ANCHOR:
            row_branches[node].append(branch)
            node = parents[node]
    return [list(range(len(owners) + 1)), *row_branches]


def n_on_path(row_branches: RowBranches, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each branch: the number of its rows on the accepted path, and of all its rows.

    `path` are rows, each the child of the one before, the anchor first.
    """
    accepted = set(path)
    kept, held = [0] * len(row_branches[0]), [0] * len(row_branches[0])
    for row, branches in enumerate(row_branches):
        for branch in branches:
            held[branch] += 1
            kept[branch] += row in accepted
    return kept, held


@dataclass(frozen=True)
class _Verified:
    """A verified tree, from position `begin` on, whose rejected rows are still in the cache."""

    begin: int
    row_branches: RowBranches
    path: Sequence[int]


class Cells:
    """The cells of all sequences in a context. `ids[seq]` are the ids of a sequence."""

    def __init__(
        self,
        context: Any,
        n_seq: int,
        n_branches: int,
        *,
        n_swa: int,
        rollback: Rollback,
        has_streams: bool = False,
        spare: Sequence[int] = (),
    ) -> None:
        """`n_swa`: the reach of layers with a sliding window, in tokens; 0 without any. `rollback`:
        how far back the sequences can be cut. `has_streams`: see `TargetOptions`. `spare`: the ids
        more that the context has to keep each sequence's cells in the order of its tokens, two
        where a sequence has a recurrent state; none: they are not. It then has no branches."""
        self.ids = ids_of(n_seq, n_branches)
        self._spare = list(spare)
        self._whole_context = context
        self._is_lost = False
        self._log = CellLog(api.llama_n_ctx(context), n_seq) if spare else None
        self._n_branches = n_branches
        self._context = native.address(context)
        self._memory = api.llama_get_memory(context)
        self._n_swa = n_swa
        self._rollback = rollback
        self._has_streams = has_streams
        self._held = [[0] * n_branches for _ in range(n_seq)]
        """For each branch, the number of its sequence's tokens in it. Not used for the first
        one."""
        self._n_used = [1] * n_seq
        """For each sequence, the number of its branches that may have cells."""
        self._row_branches: dict[int, RowBranches] = {}
        """The branches of the trees in the last pass, by sequence."""
        self._verified: dict[int, _Verified] = {}
        self._wide: list[list[tuple[int, int]]] = [[] for _ in range(n_seq)]
        """For each sequence, the images that take more cells than positions: where each ends, and
        how many more."""

    def n_cells(self, seq: int, length: int) -> int:
        """The number of cells of a sequence's first `length` positions."""
        return length + sum(n_more for end, n_more in self._wide[seq] if end <= length)

    def _position(self, seq: int, n_cells: int) -> int:
        """The number of a sequence's positions in its first `n_cells` cells."""
        for end, n_more in self._wide[seq]:
            n_cells -= n_more if n_cells >= end + n_more else 0
        return n_cells

    def widen(self, seq: int, end: int, n_more: int) -> None:
        """The image that ends at this position of a sequence has `n_more` cells than positions."""
        if n_more:
            self._wide[seq] = [*self._wide[seq], (end, n_more)]

    def _narrow(self, seq: int, length: int) -> None:
        self._wide[seq] = [wide for wide in self._wide[seq] if wide[0] <= length]

    def place(self, batch: Batch) -> Sequence[Sequence[int]]:
        """llama.cpp's ids of each row of a batch; empty for a batch without trees.

        Also lets the branches of its trees catch up with their sequences.
        """
        self._row_branches.clear()
        if batch.shape == "chain":
            return ()
        rows: list[list[int]] = []
        for part in batch.parts:
            ids = self.ids[part.seq]
            if part.parents is None:
                rows += [[ids[0]]] * part.n_rows
                continue
            row_branches = branches_of_rows(part.parents, self._n_branches)
            self._row_branches[part.seq] = row_branches
            native.edit_cells(self._context, (), self._catch_up(part.seq, part.begin, row_branches))
            rows += [[ids[branch] for branch in branches] for branches in row_branches]
        return rows

    def keep(self, part: Part, path: Sequence[int]) -> bool:
        """As `Target.keep`."""
        row_branches = self._row_branches.pop(part.seq, None)
        if row_branches is None:
            rejects = len(path) < part.n_rows
            return self.truncate(part.seq, part.begin + len(path)) if rejects else True
        if len(path) > 1:
            ids = self.ids[part.seq]
            api.llama_memory_seq_cp(
                self._memory,
                ids[row_branches[path[-1]][0]],
                ids[0],
                part.begin + 1,
                part.begin + len(path),
            )
        self._verified[part.seq] = _Verified(part.begin, row_branches, path)
        return True

    def tidy(self, *, ahead: bool = False) -> None:
        """Remove the rejected rows of trees. `ahead`: another tree of as many rows will follow."""
        if not self._verified:
            return
        cuts: list[tuple[int, int]] = []
        copies: list[_Copy] = []
        for seq, tree in self._verified.items():
            ids, held = self.ids[seq], self._held[seq]
            kept, had = n_on_path(tree.row_branches, tree.path)
            for branch in range(1, len(kept)):
                held[branch] = tree.begin + kept[branch]
                if kept[branch] < had[branch]:
                    cuts.append((ids[branch], held[branch]))
            if ahead:
                copies += self._catch_up(seq, tree.begin + len(tree.path), tree.row_branches)
        self._verified.clear()
        native.edit_cells(self._context, cuts, copies)

    def before_pass(self, n_rows: int) -> None:
        """Make room for `n_rows` rows in the next cells. Raises BackendError if llama.cpp fails at
        that, then and from then on: all sequences are lost."""
        self.tidy()
        log = self._log
        if self._is_lost:
            raise BackendError(_LOST)
        if log is None or not log.must_pack(n_rows):
            return
        api.llama_memory_seq_rm(self._memory, self._spare[0], -1, -1)
        self._rollback.wait()
        if sequence_state.size_of_all(self._whole_context) > host_memory()[0] // 2:
            self._log = None  # no room for the copy: from now on rows go where there is room
            return
        self._is_lost = not sequence_state.pack(self._whole_context)
        if self._is_lost:
            raise BackendError(_LOST)
        log.pack()

    def after_pass(self, seq_ids: Sequence[int]) -> None:
        """Rows of these sequences, in this order, are in the cache now."""
        if self._log is not None:
            self._log.append(seq_ids)

    def restore(self, seq: int, state: NDArray[np.uint8], tokens: Sequence[int]) -> bool:
        """Put saved tokens back into an empty sequence; see `sequence_state.restore`."""
        wide = more_cells(tokens)
        n_cells = len(tokens) + sum(n_more for _, n_more in wide)
        self.before_pass(n_cells)
        if not sequence_state.restore(self._whole_context, seq, state):
            return False
        self._wide[seq] = wide
        self.after_pass([seq] * n_cells)
        return True

    def _give_up(self, seq: int, length: int) -> None:
        """Before a sequence loses positions `length` and up: their cells stay taken."""
        if self._log is None:
            return
        cut = self._log.cut(seq, self.n_cells(seq, length))
        begin, end = (self._position(seq, n) for n in cut)
        if begin < end:
            taker, *empty = self._spare
            api.llama_memory_seq_cp(self._memory, self.ids[seq][0], taker, begin, end)
            if empty:  # a recurrent state came along, and goes with a copy of none
                api.llama_memory_seq_cp(self._memory, empty[0], taker, 0, 0)

    def truncate(self, seq: int, length: int) -> bool:
        """Forget positions `length` and up. False: this sequence cannot, and nothing was done."""
        self.tidy()
        ids, held = self.ids[seq], self._held[seq]
        if 0 < length < self._rollback.shortest(seq):
            return False
        self._give_up(seq, length)
        taken_back = length > 0 and self._rollback.take_back(seq, length)
        if not taken_back and not api.llama_memory_seq_rm(self._memory, ids[0], length, -1):
            return False
        self._rollback.cut(seq, length)
        self._narrow(seq, length)
        for branch, n in enumerate(held):
            if n > length:
                api.llama_memory_seq_rm(self._memory, ids[branch], length, -1)
                held[branch] = length
        return True

    def copy(self, source: int, target: int, length: int) -> bool:
        """As `Target.copy`, without a checkpoint."""
        ids = self.ids[source][0], self.ids[target][0]
        if self._has_streams:
            # llama.cpp's own copy comes with the next pass, when either may be another text.
            state = sequence_state.save(self._whole_context, ids[0])
            if not sequence_state.restore(self._whole_context, ids[1], state):
                return False
            api.llama_memory_seq_rm(self._memory, ids[1], length, -1)
            if not self.sees(target, length):  # of a sliding window only the last cells came
                self.clear(target)
                return False
        else:
            api.llama_memory_seq_cp(self._memory, *ids, 0, length)
        self._rollback.share(source, target)
        if self._log is not None:
            self._log.share(source, target, self.n_cells(source, length))
        self._wide[target] = [wide for wide in self._wide[source] if wide[0] <= length]
        return True

    def sees(self, seq: int, length: int) -> bool:
        """As `Target.sees`. Layers with a window are also saved without the cells behind it."""
        if not self._n_swa or not length:
            return True
        return 0 <= self._first(self.ids[seq][0]) <= max(0, length + 1 - self._n_swa)

    def clear(self, seq: int) -> None:
        """Forget a sequence, also the rows that a failed pass has left of it."""
        self._verified.pop(seq, None)
        self._give_up(seq, 0)
        for id_ in self.ids[seq][: self._n_used[seq]]:
            api.llama_memory_seq_rm(self._memory, id_, -1, -1)
        self._rollback.cut(seq, 0)
        self._narrow(seq, 0)
        self._held[seq] = [0] * len(self.ids[seq])
        self._n_used[seq] = 1

    def _catch_up(self, seq: int, length: int, row_branches: RowBranches) -> list[_Copy]:
        """The copies that give the branches of a tree the first `length` tokens."""
        ids, held, n = self.ids[seq], self._held[seq], len(row_branches[0])
        self._n_used[seq] = max(self._n_used[seq], n)
        if self._n_swa:
            for branch in range(1, n):
                if held[branch] and self._first(ids[branch]) != self._first(ids[0]):
                    # llama.cpp requires all ids of a row to begin with the same cell.
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
