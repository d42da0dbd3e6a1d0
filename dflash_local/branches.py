"""The ids under which llama.cpp knows a sequence, its branches: a draft tree's rows bear one each.

A row attends to the cells that bear its first id, and llama.cpp keeps its graph for as long as the
first ids of a batch's rows stay the same. So each row of a tree has a branch of its own, borne by
every row on the way to it, whatever the shape of the tree; a chain needs the first branch only,
which has all of the sequence that has been accepted. Pure: knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_local.draft import ANCHOR

MOST_IDS = 256
"""Of a context: llama.cpp's limit."""
MOST_BRANCHES, LEAST_BRANCHES = 32, 16
"""Of a sequence: a row each of the widest trees that are worth it anywhere, or of usual ones where
there are several sequences, as every pass costs llama.cpp a look at all ids."""

Lines = list[list[int]]
"""For each row of a tree, the anchor first, the branches that it lies on, its own one first."""


def shared_out(n_seq: int, n_batch: int) -> int:
    """How many branches each of `n_seq` sequences can have; with 1 or 2 there is no tree."""
    wanted = max(MOST_BRANCHES // n_seq, LEAST_BRANCHES)
    n = min(wanted, MOST_IDS // n_seq, n_batch // n_seq)
    return n if n > 2 else 1


def ids_of(n_seq: int, n_branches: int) -> list[list[int]]:
    """The ids of each sequence, [n_seq][n_branches]: its own number first."""
    more = n_branches - 1
    return [[seq, *range(n_seq + seq * more, n_seq + (seq + 1) * more)] for seq in range(n_seq)]


def lines(parents: Sequence[int], n_branches: int) -> Lines:
    """Branches of the anchor and of each node of a draft, as many as it has rows. Where there are
    too few for that, a row shares the branch of its first child, and the graph is built anew for
    each other shape. Raises ValueError where not even each leaf can have its own."""
    n = len(parents)
    owners: Sequence[int] = range(n)
    if n >= n_branches:
        inner = set(parents)
        owners = [node for node in range(n) if node not in inner]
        if len(owners) >= n_branches:
            raise ValueError(
                f"a tree of {len(owners)} leaves; with {n_branches} branches it has one less"
            )
    found: Lines = [[] for _ in range(n)]
    for branch, node in enumerate(owners, start=1):
        while node != ANCHOR:
            found[node].append(branch)
            node = parents[node]
    return [list(range(len(owners) + 1)), *found]


def n_common(rows: Lines, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each branch of a pass, how many of its rows are on the accepted path, and how many it has.
    `path` are rows, each the child of the one before, the anchor first."""
    accepted = set(path)
    kept, held = [0] * len(rows[0]), [0] * len(rows[0])
    for row, branches in enumerate(rows):
        for branch in branches:
            held[branch] += 1
            kept[branch] += row in accepted
    return kept, held
