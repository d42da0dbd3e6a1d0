"""What is verified of a draft: a chain, or a tree within the bounds of a pass. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from dflash_local.draft import ANCHOR, Draft
from dflash_local.errors import InputError
from dflash_local.tree import grow

DraftShape = Literal["chain", "tree", "auto"]
SHAPES: tuple[DraftShape, ...] = ("chain", "tree", "auto")


def checked_shape(name: Any) -> DraftShape:
    """Raises InputError for what is none."""
    if name not in SHAPES:
        raise InputError(f"draft_shape is {name!r}; expected one of {', '.join(SHAPES)}")
    return cast(DraftShape, name)


@dataclass(frozen=True)
class Bounds:
    """Of the tree of one sequence: nodes, tokens one after the other, leaves."""

    n_nodes: int
    n_depth: int
    n_leaves: int


def as_chain(draft: Draft, n_vocab: int) -> Draft:
    """A draft up to the first token that is none. Raises InputError for a tree."""
    if not draft.is_chain:
        raise InputError("this engine verifies chains; the drafter proposed a tree")
    return draft.valid_prefix(n_vocab)


def as_tree(draft: Draft, n_vocab: int, bounds: Bounds) -> Draft:
    """The best tree that a draft gives: grown from its candidates, or if it is a tree or has no
    choice of candidates, what of it is within the bounds."""
    known = draft.candidates
    if draft.is_chain and known is not None and known.ids.shape[1] > 1:
        return grow(
            known,
            bounds.n_nodes,
            n_vocab,
            max_leaves=bounds.n_leaves,
            max_depth=bounds.n_depth,
        )
    return _within(draft.valid_prefix(n_vocab), bounds)


def _within(draft: Draft, bounds: Bounds) -> Draft:
    """The first nodes that fit; of equal siblings the first one."""
    keep: list[bool] = []
    edges: set[tuple[int, int]] = set()
    parents: set[int] = set()
    n_leaves = 1
    for node, (parent, depth) in enumerate(zip(draft.parents, draft.depths, strict=True)):
        edge = parent, draft.tokens[node]
        forks = parent in parents
        keep.append(
            (parent == ANCHOR or keep[parent])
            and len(edges) < bounds.n_nodes
            and depth <= bounds.n_depth
            and edge not in edges
            and n_leaves + forks <= bounds.n_leaves
        )
        if keep[node]:
            n_leaves += forks
            edges.add(edge)
            parents.add(parent)
    return draft if all(keep) else draft.subtree(keep)


def allowed(draft: Draft, n_valid: Callable[[Sequence[int]], int]) -> Draft:
    """Without the nodes whose path is refused, with all below them: `n_valid` says how many tokens
    of a path may be emitted."""
    if draft.is_chain:
        return draft.clip(n_valid(draft.tokens))
    keep = [False] * len(draft)
    for leaf in draft.leaves:
        path = draft.path(leaf)
        for node in path[: n_valid([draft.tokens[node] for node in path])]:
            keep[node] = True
    return draft if all(keep) else draft.subtree(keep)
