"""The ids under which llama.cpp knows a sequence: one for each leaf that a draft tree may have.

A row of a tree attends to the cells that bear its first id, so each leaf has an id, borne by every
row on the way to it. What is accepted bears all ids of its sequence, so that no round touches the
text before it. Pure: knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.draft import ANCHOR

MOST_IDS = 256
"""Of a context: llama.cpp's limit."""
MOST_BRANCHES = 16
"""Of a sequence: the best tree of 31 nodes seldom has more leaves, and after each round every id
costs a look at all cells."""

Lines = list[list[int]]
"""For each row of a tree, the anchor first, the branches that it lies on: numbers of leaves."""


def shared_out(n_seq: int, n_batch: int) -> int:
    """How many branches each of `n_seq` sequences can have; 1 is too few for a tree."""
    return max(min(MOST_BRANCHES, MOST_IDS // n_seq, n_batch // n_seq), 1)


def ids_of(n_seq: int, n_branches: int) -> list[list[int]]:
    """The ids of each sequence, [n_seq][n_branches]: its own number first."""
    more = n_branches - 1
    return [[seq, *range(n_seq + seq * more, n_seq + (seq + 1) * more)] for seq in range(n_seq)]


def lines(parents: Sequence[int], n_branches: int) -> Lines:
    """Branches of the anchor and of each node of a draft. The anchor lies on all, those that the
    tree has no leaf for too. Raises ValueError where the tree has more leaves than branches."""
    inner = set(parents)
    found: Lines = [[] for _ in parents]
    n_leaves = 0
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        if n_leaves == n_branches:
            raise ValueError(f"a tree of more than {n_branches} leaves, one for each branch")
        node = leaf
        while node != ANCHOR:
            found[node].append(n_leaves)
            node = parents[node]
        n_leaves += 1
    return [list(range(n_branches)), *found]


@dataclass(frozen=True)
class Cut:
    """`branch` loses what it has beyond its first `length` rows of a pass."""

    branch: int
    length: int


@dataclass(frozen=True)
class Graft:
    """`branch` takes rows `begin` to `end`, counted along the path, from branch `source`."""

    source: int
    branch: int
    begin: int
    end: int


def settle(rows: Lines, path: Sequence[int]) -> tuple[list[Cut], list[Graft]]:
    """What brings all branches to the accepted path of a pass, and to nothing else: first the
    cuts, then the grafts. `path` are rows, each the child of the one before, the anchor first."""
    n_held: dict[int, int] = {}
    for branches in rows:
        for branch in branches:
            n_held[branch] = n_held.get(branch, 0) + 1
    n_common = dict.fromkeys(n_held, 0)
    for row in path:
        for branch in rows[row]:
            n_common[branch] += 1
    source, end = rows[path[-1]][0], len(path)
    cuts = [Cut(branch, n) for branch, n in n_common.items() if n < n_held[branch]]
    grafts = [Graft(source, branch, n, end) for branch, n in n_common.items() if n < end]
    return cuts, grafts
