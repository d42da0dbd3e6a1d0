"""A draft tree: the likeliest continuations under the product of the drafter's distributions.

The drafter gives a distribution for each position of its block, from one pass. If positions were
independent, a path had the product of its tokens' probabilities, and the tree of n nodes with the
greatest expected accepted length is that of the n likeliest paths (DDTree: Ringel and Romano 2026,
arXiv 2604.12989): a path is never likelier than what it begins with, so these are a tree.
Best first finds them in order, so that the first m nodes are the best tree of m.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from dflash_local.draft import ANCHOR, Candidates, Draft

_NONE = -inf


def grow(
    candidates: Candidates,
    n_nodes: int,
    n_vocab: int,
    *,
    max_leaves: int = 64,
    max_depth: int | None = None,
    max_children: int | None = None,
) -> Draft:
    """The best tree of at most `n_nodes`, likeliest node first; of equals the shallower, then the
    one whose parent came first, then the drafter's first.

    Tokens outside 0..n_vocab-1, repeated ones of a position and those of no probability are left
    out. With `max_leaves`, a node that would be one leaf too many is left out with all that would
    have come after it. Fewer nodes where the candidates give no more. Log-probabilities of the
    draft are those of each token at its position.
    """
    depth = len(candidates.ids) if max_depth is None else min(max_depth, len(candidates.ids))
    levels: list[list[tuple[float, int]]] = []  # as deep as the tree has come to be
    tokens: list[int] = []
    parents: list[int] = []
    own: list[float] = []
    n_leaves = 0
    # Minus the log-probability of the path, depth, parent, rank, and that of the parent's path.
    waiting: list[tuple[float, int, int, int, float]] = []

    def offer(level: int, parent: int, rank: int, before: float) -> None:
        if level == len(levels) and level < depth:
            ids, logprobs = candidates.ids[level].tolist(), candidates.logprobs[level].tolist()
            levels.append(_usable(ids, logprobs, n_vocab)[:max_children])
        if level < depth and rank < len(levels[level]):
            heappush(waiting, (before - levels[level][rank][0], level, parent, rank, before))

    if max_leaves > 0:
        offer(0, ANCHOR, 0, 0.0)
    while waiting and len(tokens) < n_nodes:
        path, level, parent, rank, before = heappop(waiting)
        if rank:  # its parent has a child already
            if n_leaves == max_leaves:
                continue
            n_leaves += 1
        elif parent == ANCHOR:
            n_leaves = 1
        node = len(tokens)
        logprob, token = levels[level][rank]
        tokens.append(token)
        parents.append(parent)
        own.append(logprob)
        offer(level, parent, rank + 1, before)
        offer(level + 1, node, 0, path)
    return Draft(tokens, parents, own, candidates)


def _usable(ids: list[int], logprobs: list[float], n_vocab: int) -> list[tuple[float, int]]:
    """The candidates of a position that can be drafted, best first."""
    seen: set[int] = set()
    usable: list[tuple[float, int]] = []
    least = 0.0
    for token, logprob in zip(ids, logprobs, strict=True):
        # Never above the one before, and not a number counts as none.
        if 0 <= token < n_vocab and token not in seen and logprob > _NONE:
            least = min(least, logprob)
            seen.add(token)
            usable.append((least, token))
    return usable
