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
from collections.abc import Sequence

FACE_VALUE = (-0.3, 1.1)
"""`a`, `b` of a drafter that is as often right as it says (fits within 0.03 from 0.2 to 0.99)."""

_VARIANCE = (0.5, 0.0, 0.12)
"""Of `a`, both and `b`, from one answer to the next."""
_WALK = (0.0015, 0.0001)
"""What a round adds to the variances of `a` and `b`: texts drift."""
_TURN = 0.4
"""What a turn of the text adds to the variance of `a`, and how many variances of the outcomes of
the last rounds, each weighing `_MEMORY` of the next, show it."""
_MEMORY, _SURPRISE = 0.85, 5.0
_COLD_CHANCE = 0.75
_SHARE, _YOUNG = 0.02, 4
"""How far a round of a request moves what the next request starts from: in the end, and at first
as a mean over the rounds seen and a few imagined."""
_RECENT = 8
_FLOOR, _NUDGE = -20.0, 0.001
_ENOUGH_TRIALS = 48


class Prior:
    """What a request begins with: the average of those before it. One per drafter."""

    def __init__(self, block_size: int) -> None:
        self.a, self.b = FACE_VALUE
        self.rounds = 0
        self.curve = [_COLD_CHANCE**j for j in range(1, block_size)]

    def learn(self, a: float, b: float, curve: Sequence[float]) -> None:
        """One round of a request: its parameters, and the survival of its draft."""
        self.rounds += 1
        share = max(_SHARE, 1 / (_YOUNG + self.rounds))
        self.a += share * (a - self.a)
        self.b += share * (b - self.b)
        if len(curve) == len(self.curve):
            self.curve = [
                old + share * (new - old) for old, new in zip(self.curve, curve, strict=True)
            ]


class Survival:
    """The filter of one request. Numbers only; no clock, no randomness."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.a, self.b = prior.a, prior.b
        self.fresh = True
        self._aa, self._ab, self._bb = _VARIANCE
        self._recent: deque[list[float]] = deque(maxlen=_RECENT)
        self._error = self._error_variance = 0.0
        self._trials = 0
        self._promised = 0.0
        self._kept = 0

    def curve(self, logprobs: Sequence[float]) -> list[float]:
        """The chance of each draft that it and all before it are accepted; never rising."""
        a, b, chance = self.a, self.b, 1.0
        exp, log = math.exp, math.log
        curve = []
        for logprob in logprobs:
            # Not a number counts as no confidence at all.
            x = -log(_NUDGE - min(logprob, 0.0)) if logprob > _FLOOR else -3.0
            chance /= 1.0 + exp(-a - b * x)
            curve.append(chance)
        return curve

    def hopeful(self, logprobs: Sequence[float]) -> list[float]:
        """`curve` with each chance one standard deviation up: what may be after a long pause."""
        chance = 1.0
        curve = []
        for logprob in logprobs:
            x = _feature(logprob)
            deviation = math.sqrt(max(self._aa + x * (2 * self._ab + x * self._bb), 0.0))
            chance /= 1.0 + math.exp(-self.a - self.b * x - deviation)
            curve.append(chance)
        return curve

    def begin(self) -> None:
        """Before a draft: nothing seen yet, so start from what other requests have by now."""
        if self.fresh:
            self.a, self.b = self._prior.a, self._prior.b

    def typical(self, *, hopeful: bool = False) -> list[float]:
        """The mean curve of the last few drafts, as judged now; the prior's before the first."""
        prior = self._prior.curve
        if not self._recent:
            return prior
        judge = self.hopeful if hopeful else self.curve
        sums = [0.0] * len(prior)
        for logprobs in self._recent:
            for j, chance in enumerate(judge(logprobs[: len(sums)])):
                sums[j] += chance
        n = len(self._recent)
        return [(total + 0.5 * old) / (n + 0.5) for total, old in zip(sums, prior, strict=True)]

    def observe(self, logprobs: Sequence[float], verified: int, accepted: int) -> None:
        """Of the first `verified` drafts, `accepted` were kept and the next one, if any, not."""
        self._recent.append(list(logprobs))
        self.fresh = False
        a, b, aa, ab, bb = self.a, self.b, self._aa, self._ab, self._bb
        aa += _WALK[0]
        bb += _WALK[1]
        error = _MEMORY * self._error
        variance = _MEMORY * self._error_variance
        for j in range(min(accepted + 1, verified, len(logprobs))):
            x = _feature(logprobs[j])
            q = 1.0 / (1.0 + math.exp(-a - b * x))
            to_a, to_b = aa + ab * x, ab + bb * x
            spread = q * (1.0 - q)
            gain = 1.0 / (1.0 + spread * (to_a + x * to_b))
            miss = (j < accepted) - q
            error += miss
            variance += spread
            step = gain * miss
            a += to_a * step
            b += to_b * step
            shrink = gain * spread
            aa -= shrink * to_a * to_a
            ab -= shrink * to_a * to_b
            bb -= shrink * to_b * to_b
        self.a = min(max(a, -8.0), 8.0)
        self.b = min(max(b, 0.0), 3.0)
        if error * error > _SURPRISE * variance + 1.0:
            aa = min(aa + _TURN, _VARIANCE[0])
            error = variance = 0.0
        self._aa, self._ab, self._bb = aa, ab, bb
        self._error, self._error_variance = error, variance
        if verified:
            self._tally(logprobs, verified, accepted)
            self._prior.learn(self.a, self.b, self.curve(logprobs))

    def rest(self, rounds: int) -> None:
        """`rounds` went by without a draft: what was learnt is worth less, the last drafts too."""
        self._aa = min(self._aa + _WALK[0] * rounds, _VARIANCE[0])
        self._bb = min(self._bb + _WALK[1] * rounds, _VARIANCE[2])
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

    def _tally(self, logprobs: Sequence[float], verified: int, accepted: int) -> None:
        n = min(accepted + 1, verified, len(logprobs))
        self._trials += n
        self._kept += min(accepted, n)
        self._promised += sum(math.exp(max(min(logprob, 0.0), _FLOOR)) for logprob in logprobs[:n])


def _feature(logprob: float) -> float:
    return -math.log(_NUDGE - min(logprob, 0.0)) if logprob > _FLOOR else -3.0
