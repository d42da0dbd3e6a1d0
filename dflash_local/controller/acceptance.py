"""The chance that each node of a draft is accepted: the drafter's own confidence, corrected.

The chance that a drafter's first choice is accepted, given that those before it were, is taken as

    q = sigmoid(a + b x),    x = -log(-logprob + 0.001)

The complementary log-log of the drafter's probability tells 0.97 from 0.999. `a` and `b` follow the
outcomes by a Kalman filter on the logistic likelihood (the extended filter of Fahrmeir 1992 with
two states in a random walk; `native/draft_chances.cpp`). In a tree, the other candidates share the
rest, 1 - q, in the drafter's proportions. What follows those is less likely than it says, by a
share that is learnt. A node's chance is the product along its path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, takewhile
from operator import mul
from typing import Any

from dflash_local.controller.costs import LEAST, SLOW
from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.draft.shape import ShapeName
from dflash_local.draft.tree import Chances, grow
from dflash_local.llama import native

_UNKNOWN = (-0.3, 1.1, 0.5, 0.0, 0.12)
"""`a`, `b` of a drafter that is as often right as it says (fits within 0.03 from 0.2 to 0.99), and
the variances of `a`, of both together and of `b` before anything is seen of it."""
_WALK = 0.0015
"""The variance that a round adds to that of `a`. Without it, a text that drifts is not followed."""
_TOLD = 4.0
"""Nodes for which the drafter's word counts on what follows other candidates than its first ones.
Of what SmolLM2's Markov head told 0.45 came: a tree of 16 rows was thought to bring 2.6 tokens and
brought 2.06; one by what is learnt brings 2.13. With many more, this is learnt late."""
_COLD_CHANCE = 0.8
"""Of each draft, before any is seen. With 0.5 good drafters are never tried."""
_COLD_SHARES = (0.5, 0.25, 0.125)
"""The parts of the rest that the next candidates have, before any tree is seen: each half of the
one before. They only rank the nodes of the first trees."""


class Acceptance:
    """One drafter's record from all requests: how likely its drafts are accepted. No clock."""

    def __init__(self, block_size: int, n_nodes: int = 0) -> None:
        """`n_nodes` are the most of a tree, 0 if drafts are chains."""
        self.n_verified = 0
        self.n_nodes = n_nodes
        self._n_drafts = block_size - 1
        self._curves: dict[ShapeName, list[float]] = {}
        self._filter = native.DraftChances(_UNKNOWN, _WALK, _UNKNOWN[2])
        self._n_further = self._further = _TOLD  # that came, and that were to be expected

    def chances(self, draft: Draft, shape: ShapeName) -> list[float]:
        """The falling chances of a draft's nodes. A tree has them as it was grown by `rate`,
        likeliest first; without candidates it is mostly a chain."""
        if shape == "tree" and (draft.candidates is not None or not draft.is_chain):
            return draft.chances
        return list(accumulate(self._filter.each(draft.logprobs), mul))

    def of_other_shape(self, draft: Draft, shape: ShapeName) -> list[float]:
        """Those that the candidates of a draft have as one of that shape; without, its own."""
        known = draft.candidates
        if known is None:
            return self.chances(draft, "tree")
        if shape == "tree":
            return grow(known, self.n_nodes, 1 << 30, chances=self.rate(known)).chances
        return list(accumulate(self.rate(known).firsts, mul))

    def rate(self, candidates: Candidates) -> Chances:
        """The chances by which a tree of these candidates grows."""
        firsts = self._filter.each(candidates.logprobs[:, 0].tolist())
        return Chances(firsts, self._further_share)

    @property
    def _further_share(self) -> float:
        return min(self._n_further / self._further, 1.0)

    def usual(self, shape: ShapeName) -> list[float]:
        """The falling chances of a usual draft's nodes, before any of a request is seen."""
        return self._curves.get(shape) or self.cold(shape)

    def cold(self, shape: ShapeName) -> list[float]:
        """The same before any draft is seen."""
        chain = [_COLD_CHANCE**j for j in range(1, self._n_drafts + 1)]
        if shape == "chain":
            return chain
        rests = [before - chance for before, chance in pairwise([1.0, *chain])]
        others = [rest * share for rest in rests for share in _COLD_SHARES]
        return sorted([*chain, *others, *[0.0] * self.n_nodes], reverse=True)[: self.n_nodes]

    def notice(self, curve: Sequence[float], shape: ShapeName) -> None:
        """The chances of a new draft of that shape."""
        part = max(1 / (self.n_verified + 2), SLOW)
        self._curves[shape] = blended(self.usual(shape), curve, shape, part)

    def observe(self, draft: Draft, tokens: Sequence[int]) -> list[float]:
        """The target wrote `tokens` after the anchor of a verified draft; returns the drafter's
        log-probabilities of the first choices tried. With candidates, all of these are tried;
        otherwise the draft itself."""
        self.n_verified += 1
        told, n_right, known = draft.logprobs, len(tokens) - 1, draft.candidates
        if known is not None:
            told = known.logprobs[:, 0].tolist()
            pairs = zip(tokens, known.ids[:, 0].tolist(), strict=False)
            n_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if n_right < len(tokens) - 1:  # the path has left them
                self._observe_further(draft, tokens, n_right)
        tried = told[: min(n_right + 1, len(tokens))]
        self._filter.learn(tried, n_right)
        return tried

    def _observe_further(self, draft: Draft, tokens: Sequence[int], n_firsts: int) -> None:
        """Learn from what came after `n_firsts` first choices and another candidate of a path."""
        share, node = self._further_share, ANCHOR
        for depth, token in enumerate(tokens):
            children = {
                draft.tokens[i]: i
                for i, parent in enumerate(draft.parents)
                if parent == node and not draft.copied[i]
            }
            if depth > n_firsts and children:
                told = sum(math.exp(draft.logprobs[i]) for i in children.values())
                self._further += told / share
                self._n_further += token in children
            if token not in children:
                return
            node = children[token]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rounds": self.n_verified,
            "curves": self._curves,
            "filter": list(self._filter.state),
            "further": [self._n_further, self._further],
        }

    @classmethod
    def from_dict(cls, raw: Any, block_size: int, n_nodes: int = 0) -> Acceptance:
        """From `as_dict`; of trees of another size, all but their curve. Raises ValueError when it
        is not that, or of another block size."""
        made = cls(block_size, n_nodes)
        try:
            curves = {name: list(map(float, curve)) for name, curve in raw["curves"].items()}
            *state, made._n_further, made._further = map(float, [*raw["filter"], *raw["further"]])
            made.n_verified = int(raw["rounds"])
            made._filter = native.DraftChances(state, _WALK, _UNKNOWN[2])
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"nothing known of drafts: {error!r}") from None
        numbers = sum(curves.values(), [*state, made._n_further, made._further])
        is_sound = all(map(math.isfinite, numbers)) and min(made._n_further, made._further) > 0
        if not is_sound or len(curves.get("chain", made.cold("chain"))) != block_size - 1:
            raise ValueError(f"nothing known of drafts of a block of {block_size}")
        made._curves = {k: c for k, c in curves.items() if k == "chain" or len(c) == n_nodes}
        return made


def blended(
    mean: Sequence[float], curve: Sequence[float], shape: ShapeName, part: float
) -> list[float]:
    """A mean of chances, by `part` nearer to a new draft's. After a shorter chain, the rest is as
    likely as it mostly is: to count it as hopeless would keep drafts short."""
    n = len(curve)
    scale = curve[-1] / max(mean[n - 1], LEAST) if shape == "chain" and n < len(mean) else 0.0
    whole = chain(curve, (scale * chance for chance in mean[n:]))
    return [old + part * (new - old) for old, new in zip(mean, whole, strict=False)]
