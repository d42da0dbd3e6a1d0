"""How likely each drafted token is to be kept: the drafter's own confidence, put right as it goes.

The chance that a draft is accepted, given that those before it were, is taken as

    q = sigmoid(a + b x),    x = -log(-logprob + 0.001)

The complementary log-log of the drafter's probability runs over all of the line, and tells 0.97
from 0.999. `a` and `b` follow what is accepted by a Kalman filter on the logistic likelihood (the
extended filter of Fahrmeir 1992 with two states in a random walk), so an answer whose drafts are
better or worse than the drafter thinks, or whose log-probabilities say nothing at all, is followed
within a few rounds; and the filter's variance says how much is known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from dflash_local.draft.draft import Candidates

FACE_VALUE = (-0.3, 1.1)
"""`a`, `b` of a drafter that is as often right as it says (fits within 0.03 from 0.2 to 0.99)."""

_UNKNOWN = (0.5, 0.0, 0.12)
"""Variances of `a`, both and `b` before anything is seen of a drafter."""
_APART = (0.2, 0.02)
"""Variances of `a` and `b` between requests of one drafter. Without them, several requests at once
lose 1 % more."""
_WALK = 0.0015
"""What a round adds to the variance of `a`. Without it, a text that drifts is not followed: some
answers lose 1 % more."""
_MEMORY, _SURPRISE = 0.85, 5.0
"""The last rounds' outcomes are compared with what was expected; each round weighs `_MEMORY` of the
next. The text has turned when the difference squared is more than `_SURPRISE` variances."""
_TURN = 256
"""So many rounds are then taken to have gone by. Without it, only a larger `_WALK` finds a text
that turns, and takes 2 % from those that do not."""
_COLD_CHANCE = 0.8
"""Of each draft, before any is seen. With 0.5 good drafters are never tried."""
_YOUNG = 32
"""Rounds by which a drafter is known. With 8 some good ones are given up."""
_SPARSE, _SHARE = 4, 0.02
"""Then one round in so many moves, by this share, the curve that the next request starts from. With
each round, one unusual request is held against those after it."""
RECENT = 8
"""Drafts whose mean is taken for a usual one. With fewer, plans change from draft to draft."""
PRIOR_PART = 0.6
"""Of a draft: the weight of the prior's in that mean. With 1, some texts lose 2 %."""
_COLD_SHARES = (0.5, 0.25, 0.125)
"""Of what the first choice leaves, what the next ones are thought to have before any is seen."""
_DOUBT = 4.0
"""The weight of the drafter's own shares, in misses of a first choice that were seen. Without it,
the first miss decides whether trees branch."""
_FLOOR, _NUDGE = -20.0, 0.001
_NO_FEATURE = 1.0
_ENOUGH_TRIALS = 48
"""Drafts before a user is warned that few are kept. With fewer, one bad passage is told as a fault
of the pair."""


class _Filter:
    """Mean and covariance of `a`, `b`, given the outcomes seen."""

    __slots__ = ("a", "aa", "ab", "b", "bb")

    def __init__(self, a: float, b: float, aa: float, ab: float, bb: float) -> None:
        self.a, self.b = a, b
        self.aa, self.ab, self.bb = aa, ab, bb

    def walk(self, rounds: int = 1) -> None:
        self.aa = min(self.aa + _WALK * rounds, _UNKNOWN[0])

    def update(self, features: Sequence[float], accepted: int) -> tuple[float, float]:
        """The outcomes of one chain, of which `accepted` were kept and the next one, if it has a
        feature, not. Returns their surprise, and the variance it was expected to have."""
        a, b, aa, ab, bb = self.a, self.b, self.aa, self.ab, self.bb
        surprise = variance = 0.0
        for j, x in enumerate(features):
            q = 1.0 / (1.0 + math.exp(-a - b * x))
            to_a, to_b = aa + ab * x, ab + bb * x
            spread = q * (1.0 - q)
            gain = 1.0 / (1.0 + spread * (to_a + x * to_b))
            miss = (j < accepted) - q
            surprise += miss
            variance += spread
            a += to_a * gain * miss
            b += to_b * gain * miss
            shrink = gain * spread
            aa -= shrink * to_a * to_a
            ab -= shrink * to_a * to_b
            bb -= shrink * to_b * to_b
        self.a, self.b = a, max(b, 0.0)
        self.aa, self.ab, self.bb = aa, ab, bb
        return surprise, variance

    def each(self, logprobs: Sequence[float]) -> list[float]:
        """The chance of each draft that it is accepted where all before it are."""
        a, b, exp = -self.a, self.b, math.exp
        return [1.0 / (1.0 + exp(a - b * x)) for x in _features(logprobs)]

    def curve(self, logprobs: Sequence[float]) -> list[float]:
        """The chance of each draft that it and all before it are accepted; never rising."""
        return list(accumulate(self.each(logprobs), mul))


class Prior:
    """What a request begins with, learnt from those before it. One per drafter."""

    def __init__(self, block_size: int, n_nodes: int = 0) -> None:
        """`n_nodes` are the most of a tree, 0 where drafts are chains."""
        self.trees = TreePrior(n_nodes)
        self.curve = [_COLD_CHANCE**j for j in range(1, block_size)]
        self.rounds = 0
        self._filter = _Filter(*FACE_VALUE, *_UNKNOWN)
        self._recent: deque[Sequence[float]] = deque(maxlen=_YOUNG)
        self._cold = self.curve

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is known, without the drafts that it was learnt from."""
        known = self._filter
        return {
            "rounds": self.rounds,
            "curve": self.curve,
            "filter": [known.a, known.b, known.aa, known.ab, known.bb],
            "trees": self.trees.as_dict(),
        }

    @classmethod
    def from_dict(cls, raw: Any, block_size: int, n_nodes: int = 0) -> Prior:
        """From `as_dict`. Raises ValueError when it is not that, or of another block size."""
        prior = cls(block_size, n_nodes)
        try:
            curve = [float(chance) for chance in raw["curve"]]
            known = [float(x) for x in raw["filter"]]
            rounds = int(raw["rounds"])
            prior.trees = TreePrior.from_dict(raw["trees"], n_nodes)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no prior: {error!r}") from None
        numbers = [*curve, *known]
        if len(curve) != block_size - 1 or len(known) != 5 or not all(map(math.isfinite, numbers)):
            raise ValueError(f"no prior of a block of {block_size}")
        prior.rounds, prior.curve, prior._filter = rounds, curve, _Filter(*known)
        prior._cold = curve
        return prior

    def filter(self) -> _Filter:
        """For a request of which nothing is seen."""
        known = self._filter
        aa, bb = known.aa + _APART[0], known.bb + _APART[1]
        return _Filter(known.a, known.b, aa, known.ab, bb)

    def learn(self, logprobs: Sequence[float], features: Sequence[float], accepted: int) -> None:
        """The outcome of one chain of any request."""
        self.rounds += 1
        if self.rounds > _YOUNG and self.rounds % _SPARSE:
            return
        self._filter.walk()
        self._filter.update(features, accepted)
        if self.rounds <= _YOUNG:  # what it knows of itself still changes: judge all anew
            self._recent.append(logprobs)
            self.curve = _mean(self._recent, self._filter.curve, self._cold)
        elif len(logprobs) == len(self.curve):
            self.curve = [
                old + _SHARE * (new - old)
                for old, new in zip(self.curve, self._filter.curve(logprobs), strict=True)
            ]


class TreePrior:
    """The chances of a usual tree's nodes, and what a drafter's other candidates are worth."""

    def __init__(self, n_nodes: int) -> None:
        """`n_nodes` are the most of a tree, 0 where there are none."""
        self.n_nodes = n_nodes
        self._curve: list[float] | None = None
        self._promised = self._kept = _DOUBT

    def curve(self, chain: list[float]) -> list[float]:
        """The chances of a usual tree's nodes, which fall; before any is seen, after what `chain`,
        the chances of a usual chain's tokens, tells."""
        if self._curve is not None:
            return self._curve
        chances = list(chain)
        for before, chance in zip([1.0, *chain], chain, strict=False):
            chances += [(before - chance) * share for share in _COLD_SHARES]
        chances.sort(reverse=True)
        chances += [0.0] * self.n_nodes
        return chances[: self.n_nodes]

    @property
    def side(self) -> float:
        """How often other candidates come true for each time that the drafter promises it."""
        return self._kept / self._promised

    def learn(self, promised: float, kept: bool) -> None:
        """The first choice was wrong, and another candidate right or not."""
        self._promised = (1 - _SHARE) * self._promised + promised
        self._kept = (1 - _SHARE) * self._kept + kept

    def renew(self, curve: list[float], chain: list[float]) -> None:
        """The curve of a new tree; `chain` as for `curve`."""
        known = self.curve(chain)
        self._curve = [old + _SHARE * (c - old) for old, c in zip(known, curve, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"curve": self._curve, "promised": self._promised, "kept": self._kept}

    @classmethod
    def from_dict(cls, raw: Any, n_nodes: int) -> TreePrior:
        """From `as_dict`; of trees of another size, only what candidates are worth. Raises
        ValueError when it is not that."""
        prior = cls(n_nodes)
        try:
            curve = None if raw["curve"] is None else [float(chance) for chance in raw["curve"]]
            promised, kept = float(raw["promised"]), float(raw["kept"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no prior of trees: {error!r}") from None
        if not all(map(math.isfinite, [promised, kept, *(curve or [])])) or promised <= 0:
            raise ValueError("no prior of trees: not numbers")
        prior._promised, prior._kept = promised, kept
        if curve is not None and len(curve) == n_nodes:
            prior._curve = curve
        return prior


class Survival:
    """What is known of one request. Numbers only; no clock, no randomness."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self._filter = prior.filter()
        self._recent: deque[Sequence[float]] = deque(maxlen=RECENT)
        self._surprise = self._variance = 0.0
        self._trials = 0
        self._promised = 0.0
        self._kept = 0

    def notice(self, logprobs: Sequence[float]) -> None:
        """A new draft, before anything is asked of it."""
        self._filter.walk()
        # Cut short by the end of the answer, it would count as hopeless beyond.
        if len(logprobs) >= len(self._prior.curve) or not self._recent:
            self._recent.append(logprobs)

    def curve(self, logprobs: Sequence[float]) -> list[float]:
        """The chance of each draft that it and all before it are accepted; never rising."""
        return self._filter.curve(logprobs)

    def each(self, logprobs: Sequence[float]) -> list[float]:
        """The chance of each draft that it is accepted where all before it are."""
        return self._filter.each(logprobs)

    def hopeful(self, logprobs: Sequence[float]) -> list[float]:
        """`curve` with each chance one standard deviation up: what may be, for all that is seen."""
        known, chance = self._filter, 1.0
        curve = []
        for x in _features(logprobs):
            deviation = math.sqrt(max(known.aa + x * (2 * known.ab + x * known.bb), 0.0))
            chance /= 1.0 + math.exp(-known.a - known.b * x - deviation)
            curve.append(chance)
        return curve

    def typical(self) -> list[float]:
        """The mean curve of the last few drafts, as judged now; the prior's before the first."""
        if not self._recent:
            return self._prior.curve
        return _mean(self._recent, self.curve, self._prior.curve)

    def observe(self, logprobs: Sequence[float], verified: int, accepted: int) -> None:
        """Of the first `verified` drafts, `accepted` were kept and the next one, if any, not."""
        tried = min(accepted + 1, verified, len(logprobs))
        if not tried:
            return
        features = _features(logprobs)[:tried]
        surprise, variance = self._filter.update(features, accepted)
        self._surprise = _MEMORY * self._surprise + surprise
        self._variance = _MEMORY * self._variance + variance
        if self._surprise * self._surprise > _SURPRISE * self._variance + 1.0:
            self._filter.walk(_TURN)
            self._surprise = self._variance = 0.0
        prior = self._prior
        prior.learn(logprobs, features, accepted)
        if prior.rounds <= _YOUNG:  # what is seen of the drafter says more than what is of this
            self._filter = prior.filter()
        self._trials += tried
        self._kept += min(accepted, tried)
        self._promised += sum(math.exp(max(min(lp, 0.0), _FLOOR)) for lp in logprobs[:tried])

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
        if n_right < tried and candidates.ids.shape[1] > 1:
            # NaN counts as no chance.
            p = [
                math.exp(min(lp, 0.0)) if lp < math.inf else 0.0
                for lp in candidates.logprobs[n_right].tolist()
            ]
            promised = sum(p[1:]) / max(1.0 - p[0], 1e-6)
            is_kept = tokens[n_right] in candidates.ids[n_right, 1:].tolist()
            self._prior.trees.learn(min(promised, 1.0), is_kept)

    def rest(self, rounds: int) -> None:
        """`rounds` went by without a draft: what was learnt is worth less, the last drafts too."""
        self._filter.walk(rounds)
        while len(self._recent) > 1:
            self._recent.popleft()

    def shortfall(self) -> tuple[float, float] | None:
        """(kept, promised): the share of tried drafts that were kept, and that the drafter's own
        probabilities promised, where the first is far below; None otherwise or too early to say."""
        if self._trials < _ENOUGH_TRIALS:
            return None
        kept, promised = self._kept / self._trials, self._promised / self._trials
        # Drafters that give no probabilities call every draft certain.
        if promised > 0.9999 or kept > 0.6 * promised:
            return None
        return kept, promised


def _features(logprobs: Sequence[float]) -> list[float]:
    if not any(logprobs):  # a drafter that gives none
        return [_NO_FEATURE] * len(logprobs)
    log = math.log
    # Unlike `min`, `max` gives its first argument if the other is not a number: no confidence.
    return [-log(_NUDGE - min(max(_FLOOR, lp), 0.0)) for lp in logprobs]


def _mean(
    chains: deque[Sequence[float]],
    judge: Callable[[Sequence[float]], list[float]],
    prior: list[float],
) -> list[float]:
    """The mean curve of these drafts, with a part of the prior's."""
    sums = [PRIOR_PART * chance for chance in prior]
    for chain in chains:
        for j, chance in enumerate(judge(chain[: len(sums)])):
            sums[j] += chance
    return [total / (PRIOR_PART + len(chains)) for total in sums]
