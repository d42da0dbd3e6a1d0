"""Everything that one run of the benchmark found, and where; its form as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from dflash_local.bench.measure.concurrent import ConcurrencyRow
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Variant
from dflash_local.bench.measure.single import Difference, SpeedRow
from dflash_local.bench.paper import PaperValue
from dflash_local.errors import DflashError
from dflash_local.llama import runtime
from dflash_local.model import Model
from dflash_local.sampling.params import SamplingParams
from dflash_local.version import version

FORMAT = 3
"""Of the JSON object; raised when a field changes its meaning or goes."""

_PARTS = ("variant", "acceptance", "lead")
"""Of a row: their fields stand in the row itself."""


@dataclass(frozen=True)
class Environment:
    """A loaded model, and where it runs."""

    version: str
    llama_cpp: str
    devices: tuple[str, ...]
    n_threads: int
    target: str
    drafter: str | None
    n_ctx: int
    kv_type: str
    n_gpu_layers: int
    block_size: int

    @classmethod
    def of(cls, model: Model) -> Environment:
        options = model.target.options
        drafter = model.drafter
        used = [d for d in runtime.devices() if options.n_gpu_layers or d.type == "cpu"]
        return cls(
            version=version(),
            llama_cpp=runtime.llama_build(),
            devices=tuple(dict.fromkeys(device.description for device in used)),
            n_threads=model.target.n_threads,
            target=model.target.path.name,
            drafter=model.plan.drafter_name if model.plan else None,
            n_ctx=model.n_ctx,
            kv_type=" and ".join(dict.fromkeys(options.kv_types)),
            n_gpu_layers=options.n_gpu_layers,
            block_size=drafter.block_size if drafter else 0,
        )


@dataclass
class Report:
    """`paper` is by category and temperature. `interrupted`: it was ended before all was measured;
    `failure`: any other end."""

    command: str
    environment: Environment
    settings: RunSettings
    rows: list[SpeedRow] = field(default_factory=list)
    concurrency: list[ConcurrencyRow] = field(default_factory=list)
    paper: dict[tuple[str, float], PaperValue] = field(default_factory=dict)
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
        """Rows of the main variants, without any of plain decoding, from empty caches."""
        variants = self.main_variants or [PLAIN]
        return [row for row in self.rows if row.cache == "cold" and row.variant in variants]

    @property
    def differences(self) -> list[Difference]:
        return [difference for row in self.rows for difference in row.differences]

    @property
    def n_compared(self) -> int:
        """Greedy answers with drafts that were compared with plain ones."""
        if not self.settings.compare:
            return 0
        return sum(row.n_prompts for row in self.rows if row.temperature == 0 and row.drafted)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: seconds, bytes and tokens/s, six significant digits."""
        sampling = SamplingParams()
        settings = {
            "ways" if name == "variants" else name: value
            for name, value in asdict(self.settings).items()
        }
        settings |= {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
        told: dict[str, Any] = jsonable(
            {
                "format": FORMAT,
                "command": self.command,
                "machine": self.environment,
                "settings": settings,
                "rows": self.rows,
                "concurrency": self.concurrency,
                "paper": [
                    {"category": category, "temperature": temperature, **asdict(value)}
                    for (category, temperature), value in self.paper.items()
                ],
                "n_compared": self.n_compared,
                "n_differing": len(self.differences),
                "n_beyond_rounding": sum(not d.lead.is_within_rounding for d in self.differences),
                "interrupted": self.interrupted,
                "notes": self.notes,
            }
        )
        return told


def jsonable(value: Any) -> Any:
    """Rows and numbers as JSON has them; more than six digits are below a clock's resolution."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        told: dict[str, Any] = {}
        for name, each in value.items():
            told |= jsonable(each) if name in _PARTS else {name: jsonable(each)}
        return told
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    return value
