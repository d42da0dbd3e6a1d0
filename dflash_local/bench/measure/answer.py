"""One measured answer: its tokens and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from dflash_local.bench.measure.settings import Variant
from dflash_local.stats import Stats

if TYPE_CHECKING:
    from dflash_local.model import Model

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
