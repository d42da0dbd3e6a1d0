"""Joins a drafter's proposals and the offered copies into one draft: a tree, or the best chain.

All of them go into one tree, in which a token that several propose after the same path is one node.
A drafter's nodes keep their chances. A copied token has the chance of its kind, which knows whether
the drafter proposes the same; where both do, the better chance counts. The chances of one node's
children sum to at most 1. The likeliest nodes come first, so that the first m are the best m. The
joining is native (`native/joined_draft.cpp`): in Python it took a fifth of a small model's round on
a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflash_local.copies.chances import AGREES, DIFFERS, CopyChances, drafter_thinks
from dflash_local.copies.copier import Copy
from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.llama import native


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
    tokens, parents, logprobs, copied, chances = native.join_copies(
        own.tokens,
        own.parents,
        own_chances,
        [(copy.tokens, copy.chances) for copy in copies],
        n_nodes,
        n_leaves,
    )
    return Draft(tokens, parents, logprobs, _candidates(own), copied), chances


def _candidates(own: Draft) -> Candidates | None:
    """The drafter's proposals, for those who learn from them."""
    if own.candidates is not None or not own or not own.is_chain:
        return own.candidates
    ids = np.array(own.tokens, np.int32)[:, None]
    return Candidates(ids, np.array(own.logprobs, np.float32)[:, None])
