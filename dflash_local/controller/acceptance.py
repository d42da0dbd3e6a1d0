"""The chance that each node of a draft is accepted: the drafter's own confidence, corrected.

The chance that a drafter's first choice is accepted, given that those before it were, is taken as

    q = sigmoid(a + b x),    x = -log(-logprob + 0.001)

The complementary log-log of the drafter's probability runs over all of the line, and tells 0.97
from 0.999. `a` and `b` follow the outcomes by a Kalman filter on the logistic likelihood (the
extended filter of Fahrmeir 1992 with two states in a random walk). In a tree, the other candidates
share the rest, 1 - q, in the drafter's proportions. A node's chance is the product along its path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from dflash_local.controller.costs import SLOW
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import ShapeName
from dflash_local.draft.tree import grow

_FACE_VALUE = (-0.3, 1.1)
"""`a`, `b` of a drafter that is as often right as it says (fits within 0.03 from 0.2 to 0.99)."""
_UNKNOWN = (0.5, 0.12)
"""Variances of `a` and `b` before anything is seen of a drafter."""
_WALK = 0.0015
"""The variance that a round adds to that of `a`. Without it, a text that drifts is not followed."""
_COLD_CHANCE = 0.8
"""Of each draft, before any is seen. With 0.5 good drafters are never tried."""
_FLOOR, _NUDGE, _LEAST = -20.0, 0.001, 1e-12  # keep logarithms finite
_NO_FEATURE = 1.0  # `x` of a drafter that gives no probabilities: about 0.7, before it is learnt
_ANY_TOKEN = 1 << 30


class Acceptance:
    """One drafter's record from all requests: how likely its drafts are accepted. No clock."""

    def __init__(self, block_size: int, n_nodes: int = 0) -> None:
        """`n_nodes` are the most of a tree, 0 if drafts are chains."""
        self.n_verified = 0
        self.n_nodes = n_nodes
        self._n_drafts = block_size - 1
        self._curves: dict[ShapeName, list[float]] = {}
        self._a, self._b = _FACE_VALUE
        self._aa, self._ab, self._bb = _UNKNOWN[0], 0.0, _UNKNOWN[1]

    # Chances

    def each(self, logprobs: Sequence[float]) -> list[float]:
        """The chance of each first choice, if all before it are accepted."""
        a, b, exp = self._a, self._b, math.exp
        return [1.0 / (1.0 + exp(-a - b * x)) for x in _features(logprobs)]

    def chances(self, draft: Draft, shape: ShapeName) -> list[float]:
        """The falling chances of a draft's nodes. A tree has them as it was grown from `rate`d
        candidates, likeliest first; without candidates it is mostly a chain."""
        if shape == "tree" and (draft.candidates is not None or not draft.is_chain):
            return path_chances(draft)
        return list(accumulate(self.each(draft.logprobs), mul))

    def of_other_shape(self, candidates: Candidates, shape: ShapeName) -> list[float]:
        """Those that these candidates have as a draft of that shape."""
        if shape == "tree":
            return path_chances(grow(self.rate(candidates), self.n_nodes, _ANY_TOKEN))
        return list(accumulate(self.each(candidates.logprobs[:, 0].tolist()), mul))

    def rate(self, candidates: Candidates) -> Candidates:
        """Candidates with the logarithms of each one's chance, given its path."""
        raw = candidates.logprobs
        firsts: list[float] = raw[:, 0].tolist()
        own, others = [], []  # logarithms: of the first choice, of what the others are scaled by
        for first, chance in zip(firsts, self.each(firsts), strict=True):
            rest = max(1.0 - math.exp(min(first, 0.0)), _LEAST)
            own.append(math.log(max(chance, _LEAST)))
            others.append(math.log(max(1.0 - chance, _LEAST) / rest))
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

    def usual(self, shape: ShapeName) -> list[float]:
        """The falling chances of a usual draft's nodes, before any of a request is seen."""
        return self._curves.get(shape) or self.cold(shape)

    def cold(self, shape: ShapeName) -> list[float]:
        """The same before any draft is seen: a tree is as good as a chain."""
        chain = [_COLD_CHANCE**j for j in range(1, self._n_drafts + 1)]
        return chain if shape == "chain" else [*chain, *[0.0] * self.n_nodes][: self.n_nodes]

    # Learning

    def notice(self, curve: Sequence[float], shape: ShapeName) -> None:
        """The chances of a new draft of that shape."""
        known = self.usual(shape)
        curve = whole(curve, known, shape)
        part = max(1 / (self.n_verified + 2), SLOW)
        self._curves[shape] = [
            old + part * (new - old) for old, new in zip(known, curve, strict=False)
        ]

    def observe(self, draft: Draft, tokens: Sequence[int]) -> int:
        """The target wrote `tokens` after the anchor of a verified draft; returns the number of
        first choices tried. With candidates, all of these are tried; otherwise the draft itself."""
        self.n_verified += 1
        known = draft.candidates
        if known is None:
            n_right, n_tried = len(tokens) - 1, min(len(tokens), len(draft))
            self._update(draft.logprobs[:n_tried], n_right)
            return n_tried
        firsts: list[int] = known.ids[:, 0].tolist()
        n_right = 0
        for token, first in zip(tokens, firsts, strict=False):
            if token != first:
                break
            n_right += 1
        n_tried = min(n_right + 1, len(tokens), len(firsts))
        self._update(known.logprobs[:n_tried, 0].tolist(), n_right)
        return n_tried

    def _update(self, logprobs: Sequence[float], n_right: int) -> None:
        """The outcomes of a chain, of which the first `n_right` were kept and the next one not."""
        a, b, aa, ab, bb = self._a, self._b, self._aa, self._ab, self._bb
        aa = min(aa + _WALK, _UNKNOWN[0])
        for j, x in enumerate(_features(logprobs)):
            q = 1.0 / (1.0 + math.exp(-a - b * x))
            to_a, to_b = aa + ab * x, ab + bb * x
            spread = q * (1.0 - q)
            gain = 1.0 / (1.0 + spread * (to_a + x * to_b))
            miss = (j < n_right) - q
            a += to_a * gain * miss
            b += to_b * gain * miss
            shrink = gain * spread
            aa -= shrink * to_a * to_a
            ab -= shrink * to_a * to_b
            bb -= shrink * to_b * to_b
        self._a, self._b = a, max(b, 0.0)
        self._aa, self._ab, self._bb = aa, ab, bb

    # For the next process

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rounds": self.n_verified,
            "curves": self._curves,
            "filter": [self._a, self._b, self._aa, self._ab, self._bb],
        }

    @classmethod
    def from_dict(cls, raw: Any, block_size: int, n_nodes: int = 0) -> Acceptance:
        """From `as_dict`; of trees of another size, all but their curve. Raises ValueError when it
        is not that, or of another block size."""
        made = cls(block_size, n_nodes)
        try:
            curves: dict[ShapeName, list[float]] = {
                name: [float(chance) for chance in curve] for name, curve in raw["curves"].items()
            }
            numbers = [float(x) for x in raw["filter"]]
            made.n_verified = int(raw["rounds"])
            made._a, made._b, made._aa, made._ab, made._bb = numbers
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"nothing known of drafts: {error!r}") from None
        is_finite = all(map(math.isfinite, [*numbers, *(x for c in curves.values() for x in c)]))
        if not is_finite or len(curves.get("chain", made.cold("chain"))) != block_size - 1:
            raise ValueError(f"nothing known of drafts of a block of {block_size}")
        made._curves = {k: c for k, c in curves.items() if k == "chain" or len(c) == n_nodes}
        return made


def _features(logprobs: Sequence[float]) -> list[float]:
    if not any(logprobs):  # a drafter that gives none
        return [_NO_FEATURE] * len(logprobs)
    log = math.log
    # Unlike `min`, `max` gives its first argument if the other is not a number: no confidence.
    return [-log(_NUDGE - min(max(_FLOOR, lp), 0.0)) for lp in logprobs]


def whole(curve: Sequence[float], usual: Sequence[float], shape: ShapeName) -> Sequence[float]:
    """A draft's chances, for as many nodes as a usual one has. What a shorter chain has not is as
    likely after it as it mostly is: to count it as hopeless would keep drafts short. A tree had no
    more to give."""
    n = len(curve)
    if shape == "tree":
        return [*curve, *[0.0] * (len(usual) - n)]
    scale = curve[-1] / max(usual[n - 1], _LEAST) if n < len(usual) else 0.0
    return [*curve, *(scale * chance for chance in usual[n:])]


def path_chances(draft: Draft) -> list[float]:
    """Of each node, the product of the probabilities along its path."""
    sums: list[float] = []
    for parent, own in zip(draft.parents, draft.logprobs, strict=True):
        sums.append(own + (sums[parent] if parent >= 0 else 0.0))
    return [math.exp(total) for total in sums]
