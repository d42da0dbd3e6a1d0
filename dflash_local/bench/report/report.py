"""Everything that one run of the benchmark found, and its form as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from statistics import geometric_mean
from typing import Any

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.concurrent import ConcurrencyRow
from dflash_local.bench.measure.environment import Environment, MemoryUse
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant, Width
from dflash_local.bench.measure.single import Difference, SpeedRow
from dflash_local.bench.peers.comparison import ServerRow
from dflash_local.bench.peers.paper import PaperValue
from dflash_local.errors import DflashError
from dflash_local.sampling.params import SamplingParams

FORMAT = 2
"""Of the JSON object; raised when a field changes its meaning or goes."""

_PARTS = ("variant", "acceptance", "lead")
"""Of a row: their fields stand in the row itself."""


@dataclass(frozen=True)
class TreeGain:
    """Trees over chains at one temperature and width, from empty caches: the ratios of tokens a
    round and of tokens/s, geometric means over the categories. None where nothing was measured."""

    temperature: float
    width: Width
    accepted_length: float | None
    tokens_per_second: float | None


@dataclass
class Report:
    """`curve` are seconds of a target pass by its rows. `paper` is by category and temperature.
    `synthetic_length` is None where the models' own drafts were checked. `replay` names where the
    answers come from, if they were given. `interrupted`: it was ended before all was measured;
    `failure`: what else has ended it."""

    command: str
    environment: Environment
    settings: RunSettings
    rows: list[SpeedRow]
    curve: dict[int, float] = field(default_factory=dict)
    memory: MemoryUse | None = None
    concurrency: list[ConcurrencyRow] = field(default_factory=list)
    server: list[ServerRow] = field(default_factory=list)
    paper: dict[tuple[str, float], PaperValue] = field(default_factory=dict)
    synthetic_length: float | None = None
    replay: str | None = None
    notes: list[str] = field(default_factory=list)
    long_categories: tuple[str, ...] = ()
    interrupted: bool = False
    failure: DflashError | None = None

    @property
    def temperatures(self) -> list[float]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(row.temperature for row in self.rows))

    @property
    def main_variants(self) -> list[Variant]:
        """The variants that summaries show: those with the first width; none without a drafter."""
        variants = self.settings.variants
        return [variant for variant in variants if variant.width == variants[0].width]

    @property
    def main_rows(self) -> list[SpeedRow]:
        """The rows of the main variants from empty caches; those of plain decoding without a
        drafter."""
        variants = self.main_variants or [PLAIN]
        return [row for row in self.rows if row.cache == "cold" and row.variant in variants]

    def acceptance(self, temperature: float, variant: Variant) -> Acceptance:
        """What drafts are worth at a temperature, over all categories. Those of long prompts count
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
    def differences(self) -> list[Difference]:
        return [difference for row in self.rows for difference in row.differences]

    @property
    def n_compared(self) -> int:
        """Greedy answers with drafts that were compared with plain ones."""
        if not self.settings.compare:
            return 0
        return sum(row.n_prompts for row in self.rows if row.temperature == 0 and row.drafted)

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
        """For `--json`: seconds, bytes and tokens/s, six significant digits."""
        sampling = SamplingParams()
        settings = {
            "ways" if name == "variants" else name: value
            for name, value in asdict(self.settings).items()
        }
        settings |= {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
        told: dict[str, Any] = _jsonable(
            {
                "format": FORMAT,
                "command": self.command,
                "machine": self.environment,
                "settings": settings,
                "synthetic_length": self.synthetic_length,
                "replay": self.replay,
                "text_is_valid": self.synthetic_length is None and self.replay is None,
                "memory_bytes": self.memory,
                "rows": self.rows,
                "tree_over_chain": self.tree_gains,
                "cost_curve": [{"rows": n, "seconds": s} for n, s in self.curve.items()],
                "concurrency": self.concurrency,
                "llama_server": self.server,
                "paper": [
                    {"category": category, "temperature": temperature, **asdict(value)}
                    for (category, temperature), value in self.paper.items()
                ],
                "n_compared": self.n_compared,
                "n_differing": len(self.differences),
                "n_beyond_rounding": sum(
                    not difference.lead.is_within_rounding for difference in self.differences
                ),
                "interrupted": self.interrupted,
                "notes": self.notes,
            }
        )
        return told


def _ratio(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    ratios = [a / b for a, b in pairs if a and b]
    return geometric_mean(ratios) if ratios else None


def _jsonable(value: Any) -> Any:
    """Rows and numbers as JSON has them; more than six digits are below what a clock can tell."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        told: dict[str, Any] = {}
        for name, each in value.items():
            told |= _jsonable(each) if name in _PARTS else {name: _jsonable(each)}
        return told
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    return value
