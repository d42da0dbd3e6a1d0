"""Timed answers, and the speed of many: medians, spread, time per stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from dflash_local.bench.measure.settings import Variant
from dflash_local.model import Model
from dflash_local.stats import Stats

STAGES = ("draft", "verify", "sample", "host")
LEAST_TOKENS = 8
"""An answer with fewer decoded tokens says more about the clock than about the model."""


@dataclass(frozen=True)
class TimedAnswer:
    """A request's tokens and costs."""

    tokens: list[int]
    stats: Stats

    @property
    def counts(self) -> bool:
        """Whether it is long enough for its speed to mean something."""
        return self.stats.emitted > LEAST_TOKENS  # one of them is from the prompt's last row


def ask(
    model: Model,
    tokens: Sequence[int],
    variant: Variant,
    *,
    temperature: float,
    seed: int,
    max_tokens: int,
) -> TimedAnswer:
    """One request, as a user's would come. Raises as `Model.generate`."""
    model.engine.offers_copies = variant.copies
    result = model.generate(
        list(tokens), temperature=temperature, seed=seed, max_tokens=max_tokens, **variant.options()
    )
    return TimedAnswer(result.tokens, result.stats)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None for equal answers."""
    pairs = enumerate(zip_longest(left, right))
    return next((at for at, (one, other) in pairs if one != other), None)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `n` values; the least and the largest of fewer than four."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of no values."""
        found = np.fromiter(values, np.float64)
        if not found.size:
            return None
        around = (25, 75) if found.size >= 4 else (0, 100)
        low, median, high = np.percentile(found, (around[0], 50, around[1])).tolist()
        return cls(median, low, high, found.size)


@dataclass(frozen=True)
class Speed:
    """The speed of answers of one kind. `overall_tokens_per_second` is of all of them together;
    `stage_s` are mean seconds of a round, by `STAGES`."""

    tokens_per_second: Spread | None
    overall_tokens_per_second: float | None
    ttft_s: Spread | None
    stage_s: dict[str, float]
    n_answers: int
    n_tokens: int
    n_too_short: int

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer]) -> Speed:
        counted = [answer for answer in answers if answer.counts]
        total = Stats.sum(answer.stats for answer in counted)
        spent = (total.draft_s, total.verify_s, total.sample_s, total.rest_s)
        return cls(
            tokens_per_second=Spread.of(answer.stats.tokens_per_second for answer in counted),
            overall_tokens_per_second=total.tokens_per_second or None,
            ttft_s=Spread.of(answer.stats.ttft_s for answer in answers),
            stage_s={
                name: seconds / total.rounds
                for name, seconds in zip(STAGES, spent, strict=True)
                if total.rounds
            },
            n_answers=len(answers),
            n_tokens=sum(len(answer.tokens) for answer in answers),
            n_too_short=len(answers) - len(counted),
        )

    @property
    def median(self) -> float | None:
        """Of the answers' tokens/s; None if all were too short."""
        return self.tokens_per_second.median if self.tokens_per_second else None
