"""What the draft trees of a request begin with, learnt from those before it."""

from __future__ import annotations

import math
from typing import Any

_SHARE = 0.02
"""Of the newest tree, or miss, in what is kept. With more, one unusual request is held against
those after it."""
_COLD_SHARES = (0.5, 0.25, 0.125)
"""Of what the first choice leaves, what the next ones are thought to have before any is seen."""
_DOUBT = 4.0
"""The weight of the drafter's own shares, in misses of a first choice that were seen. Without it,
the first miss decides whether trees branch."""


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
