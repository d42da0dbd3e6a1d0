"""How likely the nodes of a draft are to be accepted, for chains and for trees.

A drafter's first choice at a position is judged by `Survival`. In a tree, where the first choice
fails, the other candidates share what is left as the drafter shares it out, corrected by how often
they have come true so far. A node's chance is the product along its path.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import numpy as np

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import ShapeName
from dflash_local.draft.tree import grow
from dflash_local.pays.survival import PRIOR_PART, RECENT, Prior, Survival

_LEAST = 1e-12
_ANY_TOKEN = 1 << 30


class Chances(ABC):
    """What is known of one request's drafts of one shape. All chances fall from node to node."""

    def __init__(self, survival: Survival, prior: Prior) -> None:
        self.survival = survival
        self._prior = prior

    @abstractmethod
    def rate(self, candidates: Candidates) -> Candidates:
        """Candidates with the logarithms of what each is thought to be worth, given its path."""

    @abstractmethod
    def notice(self, draft: Draft) -> None:
        """A new draft, before anything is asked of it."""

    def notice_candidates(self, candidates: Candidates) -> None:  # noqa: B027
        """The candidates of a draft that had another shape."""

    @abstractmethod
    def of(self, draft: Draft, *, hopeful: bool) -> list[float]:
        """The chance of each node to be accepted with all before it. `hopeful`: one standard
        deviation up, which is what may be; a chain's alone."""

    @abstractmethod
    def typical(self) -> list[float]:
        """Those of a usual draft of this request, in the mean of the last few."""


class ChainChances(Chances):
    """Each node is the drafter's first choice."""

    def rate(self, candidates: Candidates) -> Candidates:
        return candidates

    def notice(self, draft: Draft) -> None:
        self.survival.notice(draft.logprobs)

    def of(self, draft: Draft, *, hopeful: bool) -> list[float]:
        judge = self.survival.hopeful if hopeful else self.survival.curve
        return judge(draft.logprobs)

    def typical(self) -> list[float]:
        return self.survival.typical()


class TreeChances(Chances):
    """Nodes come likeliest first, as a tree is grown from `rate`d candidates."""

    def __init__(self, survival: Survival, prior: Prior) -> None:
        super().__init__(survival, prior)
        self._curves: deque[list[float]] = deque(maxlen=RECENT)

    def rate(self, candidates: Candidates) -> Candidates:
        raw, side = candidates.logprobs, self._prior.trees.side
        firsts: list[float] = raw[:, 0].tolist()
        own, others = [], []  # logarithms: of the first choice, of what the others are scaled by
        for first, chance in zip(firsts, self.survival.each(firsts), strict=True):
            rest = max(1.0 - math.exp(min(first, 0.0)), _LEAST)
            own.append(math.log(max(chance, _LEAST)))
            others.append(math.log(max(side * (1.0 - chance), _LEAST) / rest))
        columns = np.array([own, others], np.float32)[:, :, None]
        # Unlike `minimum`, `fmax` ignores NaN.
        rated = np.fmax(np.minimum(raw + columns[1], columns[0]), math.log(_LEAST))
        rated[:, :1] = columns[0]
        if candidates.steps is None:
            return Candidates(candidates.ids, rated)
        # After other tokens, what a step is worth is corrected like that of another candidate.
        least = np.float32(math.log(_LEAST))
        steps = np.fmax(np.minimum(candidates.steps + columns[1][:, None], 0.0), least)
        steps[:, 0] = rated
        return Candidates(candidates.ids, rated, steps=steps.astype(np.float32))

    def notice(self, draft: Draft) -> None:
        if draft.candidates is not None:
            self.survival.notice(draft.candidates.logprobs[:, 0].tolist())
        self._notice_curve(path_chances(draft))

    def notice_candidates(self, candidates: Candidates) -> None:
        tree = grow(self.rate(candidates), self._prior.trees.n_nodes, _ANY_TOKEN)
        self._notice_curve(path_chances(tree))

    def _notice_curve(self, chances: Sequence[float]) -> None:
        trees = self._prior.trees
        curve = [*chances, *[0.0] * trees.n_nodes][: trees.n_nodes]
        self._curves.append(curve)
        trees.renew(curve, self._prior.curve)

    def of(self, draft: Draft, *, hopeful: bool) -> list[float]:
        return path_chances(draft)

    def typical(self) -> list[float]:
        """With a part of the prior's tree."""
        total = [PRIOR_PART * chance for chance in self._prior.trees.curve(self._prior.curve)]
        for curve in self._curves:
            total = [a + b for a, b in zip(total, curve, strict=True)]
        return [chance / (PRIOR_PART + len(self._curves)) for chance in total]


CHANCES: dict[ShapeName, type[Chances]] = {"chain": ChainChances, "tree": TreeChances}


def path_chances(draft: Draft) -> list[float]:
    """Of each node, the product of the probabilities along its path."""
    sums: list[float] = []
    for parent, own in zip(draft.parents, draft.logprobs, strict=True):
        sums.append(own + (sums[parent] if parent >= 0 else 0.0))
    return [math.exp(total) for total in sums]
