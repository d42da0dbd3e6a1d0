"""Everything that one run of the benchmark found, and its form as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_local.bench.measure.concurrent import ConcurrencyRow
from dflash_local.bench.measure.environment import Machine, Memory
from dflash_local.bench.measure.single import Difference, Row, Settings
from dflash_local.bench.measure.speed import PLAIN, Acceptance, Way, significant
from dflash_local.bench.peers.comparison import PeerRow
from dflash_local.bench.report.gain import gains
from dflash_local.sampling.params import SamplingParams

FORMAT = 2
"""Of the JSON object; raised when a field changes its meaning or goes."""


@dataclass(frozen=True)
class PaperValue:
    """What the published evaluation reports for a pair on a dataset."""

    source: str
    speed_up: float | None
    accepted_length: float | None


@dataclass
class Report:
    """`curve` are seconds of a target pass by its rows. `synthetic_length` is None where the
    models' own drafts were checked; `paper` is by category and temperature."""

    command: str
    machine: Machine
    settings: Settings
    rows: list[Row]
    curve: dict[int, float] = field(default_factory=dict)
    memory: Memory | None = None
    concurrency: list[ConcurrencyRow] = field(default_factory=list)
    peer: list[PeerRow] = field(default_factory=list)
    paper: dict[tuple[str, float], PaperValue] = field(default_factory=dict)
    synthetic_length: float | None = None
    notes: list[str] = field(default_factory=list)
    long_categories: tuple[str, ...] = ()

    @property
    def main_ways(self) -> list[Way]:
        """The ways that summaries show: the first width, in all shapes; none without a drafter."""
        ways = self.settings.ways
        return [way for way in ways if way.width == ways[0].width]

    def main_rows(self, *, cache: str = "cold") -> list[Row]:
        """The rows of the main ways, or of plain decoding where that is all there is."""
        ways = self.main_ways or [PLAIN]
        return [row for row in self.rows if row.cache == cache and row.way in ways]

    def acceptance(self, temperature: float, way: Way) -> Acceptance:
        """What drafts are worth at a temperature, over all categories but those of long prompts,
        unless there are no others."""
        rows = [
            row
            for row in self.rows
            if row.temperature == temperature
            and row.way == way
            # Forced drafts are the same for both states of the caches.
            and (row.cache == "cold" or not row.forced)
        ]
        short = [row for row in rows if row.category not in self.long_categories]
        return Acceptance.sum(row.shown for row in short or rows)

    def is_forced(self, temperature: float, way: Way) -> bool:
        """Whether that acceptance is in part of drafts that the controller would not have made."""
        return any(
            row.forced for row in self.rows if row.temperature == temperature and row.way == way
        )

    @property
    def has_forced(self) -> bool:
        """Whether any row shows drafts that the controller would not have made."""
        return any(row.forced for row in self.rows)

    @property
    def differences(self) -> list[Difference]:
        return [difference for row in self.rows for difference in row.differences]

    @property
    def n_compared(self) -> int:
        """Greedy answers with drafts that were held against plain ones."""
        if not self.settings.compare:
            return 0
        return sum(row.n_prompts for row in self.rows if row.temperature == 0 and row.drafted)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: seconds, bytes and tokens/s, six significant digits."""
        settings = asdict(self.settings)
        sampling = SamplingParams()
        return {
            "format": FORMAT,
            "command": self.command,
            "machine": self.machine.as_dict(),
            "settings": {
                **settings,
                "temperatures": list(self.settings.temperatures),
                "ways": [way.as_dict() for way in self.settings.ways],
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
            },
            "synthetic_length": self.synthetic_length,
            "text_is_valid": self.synthetic_length is None,
            "memory_bytes": asdict(self.memory) if self.memory else None,
            "rows": [row.as_dict() for row in self.rows],
            "tree_over_chain": [gain.as_dict() for gain in gains(self.rows)],
            "cost_curve": [
                {"rows": rows, "seconds": significant(s)} for rows, s in self.curve.items()
            ],
            "concurrency": [row.as_dict() for row in self.concurrency],
            "llama_server": [row.as_dict() for row in self.peer],
            "paper": [
                {"category": category, "temperature": temperature, **asdict(value)}
                for (category, temperature), value in self.paper.items()
            ],
            "n_compared": self.n_compared,
            "n_differing": len(self.differences),
            "n_beyond_rounding": sum(
                not difference.lead.is_within_rounding for difference in self.differences
            ),
            "notes": list(self.notes),
        }


def temperatures_of(rows: Sequence[Row]) -> list[float]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(row.temperature for row in rows))
