"""Joins a drafter's proposals and the offered copies into one draft: a tree, or the best chain.

All of them go into one tree, in which a token that several propose after the same path is one node.
A drafter's nodes keep their chances. A copied token has the chance of its kind, which knows whether
the drafter proposes the same; where both do, the better chance counts. The chances of one node's
children sum to at most 1. The likeliest nodes come first, so that the first m are the best m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflash_local.copies.chances import AGREES, DIFFERS, CopyChances, drafter_thinks
from dflash_local.copies.copier import Copy
from dflash_local.draft.draft import ANCHOR, Candidates, Draft

_LEAST = 1e-12


class _Tree:
    """Nodes by parent and token, parents before children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.steps: list[float] = []  # the chance of each node where its parent is right
        self.copied: list[bool] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def find(self, parent: int, token: int) -> int | None:
        return self._nodes.get((parent, token))

    def add(self, parent: int, token: int, chance: float, *, copied: bool) -> int:
        """The node of that token, which has at least that chance."""
        node = self.find(parent, token)
        if node is not None:
            self.steps[node] = max(self.steps[node], chance)
            return node
        node = self._nodes[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.steps.append(chance)
        self.copied.append(copied)
        return node

    def chances(self) -> list[float]:
        """Of each node, that it and all before it are right."""
        totals: dict[int, float] = {}
        for parent, step in zip(self.parents, self.steps, strict=True):
            totals[parent] = totals.get(parent, 0.0) + step
        chances: list[float] = []
        for parent, step in zip(self.parents, self.steps, strict=True):
            before = chances[parent] if parent != ANCHOR else 1.0
            chances.append(before * step / max(totals[parent], 1.0))
        return chances


def judged_by_drafter(own: Draft, copies: Sequence[Copy], chances: CopyChances) -> list[Copy]:
    """The copies with the opinion of a drafter that proposes `own` on their tokens."""
    edges = {edge: i for i, edge in enumerate(zip(own.parents, own.tokens, strict=True))}
    inner = set(own.parents)
    found = []
    for copy in copies:
        node: int | None = ANCHOR
        kinds = list(copy.kinds)
        for j, token in enumerate(copy.tokens):
            if node is None or node not in inner:
                break  # it has nothing to say
            node = edges.get((node, token))
            kinds[j] = drafter_thinks(kinds[j], DIFFERS if node is None else AGREES)
        found.append(replace(copy, kinds=kinds, chances=chances.each(kinds)))
    return found


def copy_alone(copies: Sequence[Copy]) -> tuple[Draft, list[float]]:
    """The copy of which most tokens are expected, and the falling chances of its tokens."""
    curves = [copy.curve for copy in copies]
    totals = [sum(curve) for curve in curves]
    if not totals:
        return Draft.chain([]), []
    i = totals.index(max(totals))
    tokens = copies[i].tokens
    draft = Draft(tokens, list(range(ANCHOR, len(tokens) - 1)), copied=[True] * len(tokens))
    return draft, curves[i]


def joined(
    own: Draft, own_chances: Sequence[float], copies: Sequence[Copy], *, n_nodes: int, n_leaves: int
) -> tuple[Draft, list[float]]:
    """A draft of at most `n_nodes` nodes and `n_leaves` leaves, 1 for a chain, and the falling
    chances of its nodes to be accepted.

    `own` is the drafter's proposal, with the chance of each node in `own_chances`; nodes without
    one are left out. The draft keeps its candidates, those of a chain without any being its tokens.
    """
    tree = _Tree()
    kept: list[int] = []
    for parent, token, chance in zip(own.parents, own.tokens, own_chances, strict=False):
        before = own_chances[parent] if parent != ANCHOR else 1.0
        step = chance / before if before > 0 else 0.0
        above = kept[parent] if parent != ANCHOR else ANCHOR
        kept.append(tree.add(above, token, step, copied=False))
    for copy in copies:
        node = ANCHOR
        for token, chance in zip(copy.tokens, copy.chances, strict=True):
            node = tree.add(node, token, chance, copied=True)
    chances = tree.chances()
    chosen = (
        _best_path(tree.parents, chances)[:n_nodes]
        if n_leaves == 1
        else _likeliest(tree.parents, chances, n_nodes, n_leaves)
    )
    index = {ANCHOR: ANCHOR} | {node: i for i, node in enumerate(chosen)}
    steps = [tree.steps[node] for node in chosen]
    draft = Draft(
        [tree.tokens[node] for node in chosen],
        [index[tree.parents[node]] for node in chosen],
        [math.log(max(step, _LEAST)) for step in steps],
        _candidates(own),
        [tree.copied[node] for node in chosen],
    )
    return draft, [chances[node] for node in chosen]


def _candidates(own: Draft) -> Candidates | None:
    """The drafter's proposals, for those who learn from them."""
    if own.candidates is not None or not own or not own.is_chain:
        return own.candidates
    ids = np.array(own.tokens, np.int32)[:, None]
    return Candidates(ids, np.array(own.logprobs, np.float32)[:, None])


def _best_path(parents: Sequence[int], chances: Sequence[float]) -> list[int]:
    """The path from the anchor on which most tokens are expected."""
    values = list(chances)
    best = [ANCHOR] * len(parents)  # of each node, the child to go on with
    first, most = ANCHOR, 0.0
    for node in range(len(parents) - 1, -1, -1):
        if best[node] != ANCHOR:
            values[node] += values[best[node]]
        parent = parents[node]
        if parent == ANCHOR:
            if values[node] >= most:
                first, most = node, values[node]
        elif best[parent] == ANCHOR or values[node] >= values[best[parent]]:
            best[parent] = node
    path = []
    while first != ANCHOR:
        path.append(first)
        first = best[first]
    return path


def _likeliest(
    parents: Sequence[int], chances: Sequence[float], n_nodes: int, n_leaves: int
) -> list[int]:
    """The likeliest nodes. One that would be a leaf too many is left out with all below it."""
    chosen: list[int] = []
    kept, inner = {ANCHOR}, set()
    left = n_leaves
    # Sorting is stable, and a child is never likelier than its parent, which comes before it.
    for node in sorted(range(len(parents)), key=lambda node: -chances[node]):
        if len(chosen) == n_nodes:
            break
        parent = parents[node]
        forks = parent in inner or not chosen
        if parent not in kept or (forks and not left):
            continue
        left -= forks
        chosen.append(node)
        kept.add(node)
        inner.add(parent)
    return chosen
