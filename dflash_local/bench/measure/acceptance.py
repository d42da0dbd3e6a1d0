"""The outcome of drafts: accepted lengths, widths, and the help of branches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dflash_local.stats import Stats


@dataclass(frozen=True)
class Acceptance:
    """The counts of some answers together. Unless something else is said, rounds without drafts do
    not count: they always emit one token, which says nothing about drafts. Averages are None if
    no draft was checked."""

    stats: Stats = field(default_factory=Stats)

    @classmethod
    def of(cls, found: Iterable[Stats]) -> Acceptance:
        return cls(Stats.sum(found))

    @property
    def lengths(self) -> dict[int, int]:
        """Rounds by tokens emitted."""
        counts: Counter[int] = Counter()
        for (drafted, emitted), n in self.stats.outcomes.items():
            if drafted:
                counts[emitted] += n
        return dict(sorted(counts.items()))

    @property
    def n_rounds(self) -> int:
        return sum(self.lengths.values())

    @property
    def plain_rounds(self) -> int:
        """Rounds without drafts."""
        return self.stats.rounds - self.n_rounds

    @property
    def mean_length(self) -> float | None:
        """Tokens emitted per verify pass."""
        return self._per_round(sum(n * length for length, n in self.lengths.items()))

    @property
    def nodes(self) -> float | None:
        """Drafted tokens per round."""
        return self._per_round(self.stats.drafted)

    @property
    def depth(self) -> float | None:
        """Tokens of the longest branch; all the drafted ones of a chain."""
        return self._per_round(sum(self.stats.position_drafted))

    @property
    def branches(self) -> float | None:
        """Leaves of a draft: one of a chain."""
        return self._per_round(self.stats.leaves + self.n_rounds - self.stats.tree_rounds)

    @property
    def side_share(self) -> float | None:
        """Of the rounds, those that kept another branch than the chain of the likeliest drafts."""
        return self._per_round(self.stats.side_rounds)

    @property
    def mean_rows(self) -> float | None:
        """Rows of a verify pass, those without drafts included; None if there was none."""
        return 1 + self.stats.drafted / self.stats.rounds if self.stats.rounds else None

    @property
    def by_position(self) -> list[float]:
        """Share of the drafts verified at position 1, 2, ... that were accepted."""
        pairs = zip(self.stats.position_accepted, self.stats.position_drafted, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    def as_dict(self) -> dict[str, Any]:
        own = ("nodes", "depth", "branches", "side_share")
        counts = ("graph_rebuilds", "tree_rounds", "leaves", "side_rounds")
        return {
            "accepted_length": self.mean_length,
            **{name: getattr(self, name) for name in own},
            "accepted_lengths": {str(length): n for length, n in self.lengths.items()},
            "acceptance_by_position": self.by_position,
            "widths": {str(width): n for width, n in self.stats.widths.items()},
            "plain_rounds": self.plain_rounds,
            **{name: getattr(self.stats, name) for name in counts},
        }

    def _per_round(self, total: int) -> float | None:
        return total / self.n_rounds if self.n_rounds else None
