"""What trees gain over chains of the same width, by the rows of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from dflash_local.bench.measure.single import Row
from dflash_local.bench.measure.speed import Way, Width, significant


@dataclass(frozen=True)
class Gain:
    """Trees over chains at one temperature and width, from empty caches: geometric means of the
    categories' tokens a round and tokens/s. None where there was nothing to compare."""

    temperature: float
    width: Width
    length: float | None
    speed: float | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "width": self.width,
            "accepted_length": None if self.length is None else significant(self.length),
            "tokens_per_second": None if self.speed is None else significant(self.speed),
        }

    def text(self) -> str:
        """One line."""
        parts = []
        if self.length is not None:
            parts.append(f"{self.length:.2f} times the tokens a round")
        if self.speed is not None:
            parts.append(f"{self.speed:.2f} times the tokens/s")
        width = "of the width chosen" if self.width == "auto" else f"of {self.width} rows"
        return f"trees over chains {width}, temperature {self.temperature:g}: {', '.join(parts)}"


def gains(rows: Sequence[Row]) -> list[Gain]:
    """For each temperature and width that both shapes were measured with, as they were measured."""
    cold = {(r.temperature, r.category, r.way): r for r in rows if r.cache == "cold"}
    pairs: dict[tuple[float, Width], list[tuple[Row, Row]]] = {}
    for (temperature, category, way), row in cold.items():
        chain = cold.get((temperature, category, Way(way.width, "chain")))
        if way.shape == "tree" and chain is not None:
            pairs.setdefault((temperature, way.width), []).append((row, chain))
    found = []
    for (temperature, width), both in pairs.items():
        lengths = [(a.shown.mean_length, b.shown.mean_length) for a, b in both]
        speeds = [(_speed(a), _speed(b)) for a, b in both]
        found.append(Gain(temperature, width, _ratio(lengths), _ratio(speeds)))
    return [gain for gain in found if gain.length is not None or gain.speed is not None]


def _speed(row: Row) -> float | None:
    found = row.drafted.tokens_per_second if row.drafted else None
    return found.median if found else None


def _ratio(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    ratios = [a / b for a, b in pairs if a and b]
    return geometric_mean(ratios) if ratios else None
