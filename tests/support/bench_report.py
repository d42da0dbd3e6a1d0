"""A report of the benchmark made by hand: chains and trees of a fixed width, and those whose width
was chosen."""

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.concurrent import ConcurrencyRow, ConcurrentSpeed
from dflash_local.bench.measure.settings import CACHE_STATES, CacheState, RunSettings, Variant
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.measure.speed import STAGES, Speed, Spread
from dflash_local.bench.paper import PaperValue
from dflash_local.bench.report.report import Environment
from dflash_local.stats import Stats
from lab.bench.comparison import ServerRow
from lab.bench.memory import MemoryUse
from lab.bench.report import LabReport

VARIANTS = (Variant(), Variant("auto", "tree"), Variant(4), Variant(4, "tree"))


def made_report() -> LabReport:
    return LabReport(
        command="dflash-local bench",
        environment=Environment(
            version="0",
            llama_cpp="llama.cpp",
            devices=("A processor",),
            n_threads=2,
            target="target.gguf",
            drafter="drafter.gguf",
            n_ctx=4096,
            kv_type="f16",
            n_gpu_layers=0,
            block_size=16,
        ),
        settings=RunSettings(variants=VARIANTS, caches=CACHE_STATES),
        rows=[
            row(category, temperature, variant=variant, cache=cache)
            for temperature in (0.0, 0.8)
            for category in ("chat", "fim")
            for variant in VARIANTS
            for cache in CACHE_STATES
        ],
        curve={1: 0.00412345678, 2: 0.005, 16: 0.009},
        memory=MemoryUse(1 << 30, 1 << 20, 1 << 20, 1 << 28, 1 << 18, 1 << 20),
        concurrency=[
            ConcurrencyRow("chat", 0.0, n, variant, together(300), together(400), spread(1.33))
            for n in (1, 4)
            for variant in VARIANTS
        ],
        server=[server_row(n_drafts) for n_drafts in (0, 7, 15)],
        paper={("chat", 0.0): PaperValue("arXiv 2602.06036, table 1", 5.15, 6.54)},
        notes=["a note"],
    )


def row(
    category: str,
    temperature: float = 0.0,
    ratio: float = 1.5,
    variant: Variant = VARIANTS[0],
    cache: CacheState = "cold",
) -> SpeedRow:
    return SpeedRow(
        category=category,
        temperature=temperature,
        cache=cache,
        variant=variant,
        n_prompts=4,
        plain=speed(100),
        drafted=speed(100 * ratio),
        ratio=spread(ratio),
        ttft_ratio=spread(1.0),
        acceptance=acceptance(tree=variant.shape == "tree"),
        drafting="drafting is on" if variant.width == "auto" else None,
    )


def server_row(n_drafts: int, concurrency: int = 1) -> ServerRow:
    length = 3.0 if n_drafts else None
    return ServerRow("chat", 0.0, concurrency, n_drafts, Spread(50, 50, 50, 1), None, length)


def acceptance(*, tree: bool) -> Acceptance:
    """Rounds of 15 drafts that emitted 1, 4 and 16 tokens; those of trees also 6."""
    stats = Stats()
    for emitted, n in ((1, 10), (4, 5), (16, 1), (6, 2 if tree else 0)):
        for _ in range(n):
            stats.record_round(drafted=15, emitted=emitted)
            if tree:
                stats.record_tree(leaves=3, on_side=emitted == 6)
    return Acceptance(stats)


def together(total: float) -> ConcurrentSpeed:
    return ConcurrentSpeed(spread(total), speed(total / 4), acceptance(tree=False))


def speed(median: float) -> Speed:
    stages = dict.fromkeys(STAGES, 0.001)
    return Speed(
        spread(median), median, spread(0.01), stages, n_answers=4, n_tokens=64, n_too_short=0
    )


def spread(median: float) -> Spread:
    return Spread(median, 0.9 * median, 1.2 * median, 4)
