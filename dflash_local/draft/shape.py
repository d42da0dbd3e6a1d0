"""Chains and trees: the two shapes in which a proposal can be verified.

A drafter proposes a chain, with several candidates for each position if it can. A `Shape` turns it
into the nodes that one round verifies: the chain itself, or the best tree of the candidates.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.draft.tree import Chances, grow
from dflash_local.errors import InputError
from dflash_local.fit.options import SHAPES, check_one_of
from dflash_local.stats import Stats
from dflash_local.target_model.batch import Batch, Part

ShapeName = Literal["chain", "tree"]
DraftShape = Literal["chain", "tree", "auto"]
Rate = Callable[[Candidates], Chances | None]


def checked_shape(name: Any) -> DraftShape:
    """`name`, if it is a draft shape. Raises InputError if not."""
    check_one_of("draft_shape", name, SHAPES)
    return cast(DraftShape, name)


class Chain:
    """The rules by which a sequence's drafts are cut, placed in the target's batch, and counted,
    where each node follows the one before."""

    name: ShapeName = "chain"
    n_leaves = 1
    """The most branches that end in a leaf."""

    def __init__(self, n_nodes: int, *, few_counts: bool = False) -> None:
        """`n_nodes`: the most drafted nodes of one sequence in a round. `few_counts`: as many rows
        as before are cheaper than fewer, as a GPU makes a graph for each count. Then the last
        drafts of an answer may be too long for it."""
        self.n_nodes = n_nodes
        self._few_counts = few_counts

    def limit(self, n_nodes: int, remaining: int | None) -> int:
        """At most `n_nodes` nodes, fewer if only `remaining` tokens may still be emitted."""
        if remaining is None or (self._few_counts and remaining > 1):
            return n_nodes
        return max(min(n_nodes, remaining - 1), 0)

    def cut(
        self, proposal: Draft, n_vocab: int, limit: int, remaining: int | None, rate: Rate
    ) -> Draft:
        """The part of a proposal that may be verified: at most `limit` nodes, and no token outside
        the vocabulary. It keeps the proposal's candidates. A tree grows by the chances that `rate`
        gives them. Raises InputError for a proposal of the wrong shape."""
        if not proposal.is_chain:
            raise InputError("this engine verifies chains; the drafter proposed a tree")
        return proposal.valid_prefix(n_vocab).clip(limit)

    def place(
        self, batch: Batch, seq: int, begin: int, anchor: int, draft: Draft, n_rows: int = 1
    ) -> Part:
        """Add the anchor, at position `begin`, and the draft to a batch. A chain gets at least
        `n_rows` rows: those after its draft are never accepted."""
        n_more = n_rows - 1 - len(draft)
        return batch.add(seq, begin, [anchor, *draft.tokens, *[anchor] * n_more])

    def count(self, stats: Stats, draft: Draft, path: Sequence[int]) -> None:
        """Count a round that kept the rows of `path`, the anchor's row first."""
        stats.record_round(drafted=len(draft), emitted=len(path))


class Tree:
    """The same where nodes branch out, and the target follows one branch."""

    name: ShapeName = "tree"

    def __init__(self, n_nodes: int, n_branches: int) -> None:
        """`n_branches`: branches of a sequence in the target, which limit the leaves."""
        self.n_nodes = n_nodes
        self.n_leaves = n_branches - 1

    def limit(self, n_nodes: int, remaining: int | None) -> int:
        # `remaining` limits only the depth, but without any depth there is no tree.
        return n_nodes if remaining is None or remaining > 1 else 0

    def cut(
        self, proposal: Draft, n_vocab: int, limit: int, remaining: int | None, rate: Rate
    ) -> Draft:
        depth = limit if remaining is None else min(limit, remaining - 1)
        known = proposal.candidates
        if proposal.is_chain and known is not None and known.ids.shape[1] > 1:
            most = {"max_leaves": self.n_leaves, "max_depth": depth}
            return grow(known, limit, n_vocab, chances=rate(known), **most)
        return _within(proposal.valid_prefix(n_vocab), limit, depth, self.n_leaves)

    def place(
        self, batch: Batch, seq: int, begin: int, anchor: int, draft: Draft, n_rows: int = 1
    ) -> Part:
        if draft.is_copy:  # or empty; copies alone may have more rows than there are branches
            return batch.add(seq, begin, [anchor, *draft.tokens])
        # A tree that happens to be a chain is placed like any other, so that the graph is the same.
        return batch.add_tree(seq, begin, anchor, draft.tokens, draft.parents)

    def count(self, stats: Stats, draft: Draft, path: Sequence[int]) -> None:
        depth = max(draft.depths, default=0)
        stats.record_round(drafted=len(draft), emitted=len(path), depth=depth)
        if not draft.is_copy:
            on_side = draft.leaves_first([row - 1 for row in path[1:]])
            stats.record_tree(leaves=len(draft.leaves), on_side=on_side)


Shape = Chain | Tree


def _within(draft: Draft, n_nodes: int, n_depth: int, most_leaves: int) -> Draft:
    """The first nodes that fit. Of equal siblings only the first one is kept."""
    keep: list[bool] = []
    edges: set[tuple[int, int]] = set()
    parents: set[int] = set()
    n_leaves = 1
    for node, (parent, depth) in enumerate(zip(draft.parents, draft.depths, strict=True)):
        edge = parent, draft.tokens[node]
        forks = parent in parents
        keep.append(
            (parent == ANCHOR or keep[parent])
            and len(edges) < n_nodes
            and depth <= n_depth
            and edge not in edges
            and n_leaves + forks <= most_leaves
        )
        if keep[node]:
            n_leaves += forks
            edges.add(edge)
            parents.add(parent)
    return draft if all(keep) else draft.subtree(keep)


def allowed(draft: Draft, n_valid: Callable[[Sequence[int]], int]) -> Draft:
    """The draft without the nodes that a grammar refuses, and without all below these.

    `n_valid` gives the number of tokens of a path that may be emitted one after the other.
    """
    if draft.is_chain:
        return draft.clip(n_valid(draft.tokens))
    keep = [False] * len(draft)
    for leaf in draft.leaves:
        path = draft.path(leaf)
        for node in path[: n_valid([draft.tokens[node] for node in path])]:
            keep[node] = True
    return draft if all(keep) else draft.subtree(keep)
