"""The chance that copied tokens are accepted, learnt from the outcomes of all that were offered.

Each offered token is of a *kind*: one of the index's cells (how its place was found, whether other
matches agree, how much before it matches), times the drafter's opinion of it. The counting is
native (`native/copy_chances.cpp`), as it is done in each round.
"""

from __future__ import annotations

import math
from typing import Any

from dflash_local.llama import native

CopyChances = native.CopyChances
N_CELLS: int = native.CopyIndex.n_cells
N_KINDS = native.N_COPY_KINDS
AGREES, DIFFERS = 1, 2
"""A drafter's opinion of a copied token: it has the same, or another. 0: it has none there."""


def drafter_thinks(kind: int, opinion: int) -> int:
    """The kind of a token of which a drafter has this opinion."""
    return kind % N_CELLS + opinion * N_CELLS


class CopyPrior(native.CopyPrior):
    """The counts that a request begins with, learnt from those before it. One per model, of
    requests that take the likeliest token, with another for those that draw: they leave a
    repetition sooner. `tried` and `right` are copies: to change them, set them."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: CopyPrior | None = None

    def of(self, *, greedy: bool) -> CopyPrior:
        if greedy:
            return self
        self._drawn = self._drawn or CopyPrior()
        return self._drawn

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the counts by kind, without the kinds never seen."""
        cold = native.CopyPrior().tried
        numbers = zip(self.right, self.tried, cold, strict=True)
        known: dict[str, Any] = {
            str(kind): [right, tried]
            for kind, (right, tried, unseen) in enumerate(numbers)
            if tried != unseen
        }
        return known | ({"drawn": self._drawn.as_dict()} if self._drawn else {})

    @classmethod
    def from_dict(cls, raw: Any) -> CopyPrior:
        """From `as_dict`. Raises ValueError when it is not that."""
        prior = cls()
        all_right, all_tried = prior.right, prior.tried
        try:
            for key, known in raw.items():
                if key == "drawn":
                    prior._drawn = cls.from_dict(known)
                    continue
                kind, (right, tried) = int(key), known
                numbers = float(right), float(tried)
                if not (0 <= kind < N_KINDS and 0 <= numbers[0] <= numbers[1] < math.inf):
                    raise ValueError(key)
                all_right[kind], all_tried[kind] = numbers
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"no chances of copies: {error!r}") from None
        prior.right, prior.tried = all_right, all_tried
        return prior
