"""A report with all that maintainers look at, and its form as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.settings import Variant, Width
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.report import cell, remarks
from dflash_local.bench.report.report import Report, jsonable
from lab.bench.comparison import ServerRow
from lab.bench.memory import MemoryUse

_SYNTHETIC = (
    "text: invalid. Drafts were accepted as those of another pair had been, {:g} tokens per round "
    "of whole chains; speed is real, acceptance is not"
)
_REPLAY = (
    "text: given by {}. The target did all its work, and drafts that equal the text were accepted; "
    "speed is real, and acceptance is that of {}"
)


@dataclass(frozen=True)
class TreeGain:
    """Trees over chains at one temperature and width, from empty caches: the ratios of tokens a
    round and of tokens/s, geometric means over the categories. None if nothing was measured."""

    temperature: float
    width: Width
    accepted_length: float | None
    tokens_per_second: float | None


@dataclass
class LabReport(Report):
    """`curve` are seconds of a target pass by its rows. `synthetic_length` is None if the
    models' own drafts were checked. `replay` names where the answers come from, if they were
    given."""

    curve: dict[int, float] = field(default_factory=dict)
    memory: MemoryUse | None = None
    server: list[ServerRow] = field(default_factory=list)
    synthetic_length: float | None = None
    replay: str | None = None

    def acceptance(self, temperature: float, variant: Variant) -> Acceptance:
        """The worth of drafts at a temperature, over all categories. Those of long prompts count
        only where there are no others."""
        rows = [
            row
            for row in self._rows_of(temperature, variant)
            # Forced drafts are the same for both states of the caches.
            if row.cache == "cold" or not row.forced
        ]
        short = [row for row in rows if row.category not in self.long_categories]
        return Acceptance.of(row.shown.stats for row in short or rows)

    def is_forced(self, temperature: float, variant: Variant) -> bool:
        """Whether that acceptance is in part of drafts that the controller would not have made."""
        return any(row.forced for row in self._rows_of(temperature, variant))

    def _rows_of(self, temperature: float, variant: Variant) -> list[SpeedRow]:
        return [
            row for row in self.rows if row.temperature == temperature and row.variant == variant
        ]

    @property
    def tree_gains(self) -> list[TreeGain]:
        """For each temperature and width that was measured with both shapes."""
        cold = {(r.temperature, r.category, r.variant): r for r in self.rows if r.cache == "cold"}
        pairs: dict[tuple[float, Width], list[tuple[SpeedRow, SpeedRow]]] = {}
        for (temperature, category, variant), tree in cold.items():
            chain = cold.get((temperature, category, replace(variant, shape="chain")))
            if variant.shape == "tree" and chain is not None:
                pairs.setdefault((temperature, variant.width), []).append((tree, chain))
        gains = []
        for (temperature, width), both in pairs.items():
            lengths = _ratio([(a.shown.mean_length, b.shown.mean_length) for a, b in both])
            speeds = _ratio([(a.drafted_median, b.drafted_median) for a, b in both])
            if lengths is not None or speeds is not None:
                gains.append(TreeGain(temperature, width, lengths, speeds))
        return gains

    def as_dict(self) -> dict[str, Any]:
        more: dict[str, Any] = jsonable(
            {
                "synthetic_length": self.synthetic_length,
                "replay": self.replay,
                "text_is_valid": self.synthetic_length is None and self.replay is None,
                "memory_bytes": self.memory,
                "tree_over_chain": self.tree_gains,
                "cost_curve": [{"rows": n, "seconds": s} for n, s in self.curve.items()],
                "llama_server": self.server,
            }
        )
        return super().as_dict() | more


def _ratio(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    ratios = [a / b for a, b in pairs if a and b]
    return geometric_mean(ratios) if ratios else None


def validity(report: LabReport) -> list[str]:
    """A warning, where acceptance is synthetic or the text is given."""
    length = report.synthetic_length
    if report.replay is not None:
        drafts = "the model's own drafts"
        if length is not None:
            drafts = f"another pair's drafts, {length:g} tokens per round of whole chains"
        return [_REPLAY.format(report.replay, drafts)]
    return [] if length is None else [_SYNTHETIC.format(length)]


def tail(report: LabReport) -> Iterator[str]:
    """The lines below the tables."""
    for gain in report.tree_gains:
        yield _tree_gain(gain)
    yield from remarks.tail(report)


def _tree_gain(gain: TreeGain) -> str:
    parts = []
    if gain.accepted_length is not None:
        parts.append(f"{gain.accepted_length:.2f} times the tokens per round")
    if gain.tokens_per_second is not None:
        parts.append(f"{gain.tokens_per_second:.2f} times the tokens/s")
    width = "of the width chosen" if gain.width == "auto" else f"of {gain.width} rows"
    return f"trees over chains {width}, temperature {gain.temperature:g}: {', '.join(parts)}"


def server_cells(row: ServerRow) -> dict[str, str]:
    """A whole row about llama-server."""
    theirs = row.tokens_per_second
    return {
        "prompts": cell.name(row.category),
        "llama-server": f"{row.n_drafts} drafts" if row.n_drafts else "plain",
        "temp": f"{row.temperature:g}",
        "at once": str(row.concurrency),
        "tokens/s": cell.spread(theirs),
        "tokens per round": "" if row.accepted_length is None else f"{row.accepted_length:.2f}",
        cell.OURS: ", ".join(
            f"{variant}: {speed:.4g} ({speed / theirs.median:.2f})"
            for variant, speed in row.ours.items()
        ),
    }
