"""How likely each node of a draft tree is to be kept.

A drafter's first choice at a position is judged as in a chain (`Survival`). Where it fails, the
other candidates share what is left as the drafter shares it out, put right by how often they have
come true so far. A node's chance is the product along its path.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from dflash_local.draft import Candidates, Draft
from dflash_local.survival import Prior, Survival
from dflash_local.tree import grow

_RECENT = 8
_LEAST = 1e-12
_ANY_TOKEN = 1 << 30
_USUAL = 0.7
"""A chance whose logarithm stands for those along a path."""


class TreeSurvival(Survival):
    """What is known of one request that may draft trees. Chances of nodes fall, as a tree's nodes
    come, likeliest first, when it has been grown from `calibrated` candidates."""

    def __init__(self, prior: Prior) -> None:
        super().__init__(prior)
        self._trees = prior.trees
        self._curves: deque[list[float]] = deque(maxlen=_RECENT)

    def calibrated(self, candidates: Candidates) -> Candidates:
        """The logarithms of what each candidate is thought to be worth, given its path so far, in
        place of the drafter's own log-probabilities."""
        raw, side = candidates.logprobs, self._trees.side
        firsts: list[float] = raw[:, 0].tolist()
        own, others = [], []  # logarithms: of the first choice, of what the others are scaled by
        for first, chance in zip(firsts, self.each(firsts), strict=True):
            rest = max(1.0 - math.exp(min(first, 0.0)), _LEAST)
            own.append(math.log(max(chance, _LEAST)))
            others.append(math.log(max(side * (1.0 - chance), _LEAST) / rest))
        columns = np.array([own, others], np.float32)[:, :, None]
        # Unlike `minimum`, `fmax` takes what is not a number for none.
        calibrated = np.fmax(np.minimum(raw + columns[1], columns[0]), math.log(_LEAST))
        calibrated[:, :1] = columns[0]
        return Candidates(candidates.ids, calibrated)

    def notice_tree(self, chances: Sequence[float]) -> None:
        """The chances of a new tree's nodes, before anything is asked of it."""
        n = self._trees.n_nodes
        curve = [*chances, *[0.0] * n][:n]
        self._curves.append(curve)
        self._trees.renew(curve, self._prior.curve)

    def notice_candidates(self, candidates: Candidates) -> None:
        """Of a draft that is a chain, the tree that it could have been."""
        tree = grow(self.calibrated(candidates), self._trees.n_nodes, _ANY_TOKEN)
        self.notice_tree(path_chances(tree))

    def tree_typical(self, *, hopeful: bool = False) -> list[float]:
        """The mean of the last few trees, with half a tree of the prior's."""
        total = [0.5 * chance for chance in self._trees.curve(self._prior.curve)]
        for curve in self._curves:
            total = [a + b for a, b in zip(total, curve, strict=True)]
        typical = [chance / (len(self._curves) + 0.5) for chance in total]
        return self.tree_hopeful(typical) if hopeful else typical

    def tree_hopeful(self, chances: Sequence[float]) -> list[float]:
        """Each chance as it would be with every step one standard deviation up."""
        odds = _USUAL / (1.0 - _USUAL) * math.exp(math.sqrt(self._filter.aa))
        power = math.log(odds / (1.0 + odds)) / math.log(_USUAL)
        return [chance**power for chance in chances]

    def observe_answer(self, candidates: Candidates, tokens: Sequence[int]) -> None:
        """What the target wrote after an anchor whose positions had these candidates; at most as
        many tokens count as were first choices, and the one after them."""
        firsts = candidates.ids[:, 0].tolist()
        logprobs = candidates.logprobs[:, 0].tolist()
        n_right = 0
        for token, first in zip(tokens, firsts, strict=False):
            if token != first:
                break
            n_right += 1
        tried = min(n_right + 1, len(tokens), len(firsts))
        self.observe(logprobs, tried, n_right)
        if n_right < tried:
            # What is no number counts as none.
            p = [
                math.exp(min(lp, 0.0)) if lp < math.inf else 0.0
                for lp in candidates.logprobs[n_right].tolist()
            ]
            promised = sum(p[1:]) / max(1.0 - p[0], 1e-6)
            is_kept = tokens[n_right] in candidates.ids[n_right, 1:].tolist()
            self._trees.learn(min(promised, 1.0), is_kept)


def path_chances(draft: Draft) -> list[float]:
    """Of each node, the product of the probabilities along its path."""
    sums: list[float] = []
    for parent, own in zip(draft.parents, draft.logprobs, strict=True):
        sums.append(own + (sums[parent] if parent >= 0 else 0.0))
    return [math.exp(total) for total in sums]
