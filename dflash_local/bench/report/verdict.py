"""The verdict of a report, in one sentence."""

from statistics import geometric_mean

from dflash_local.bench.measure.settings import Variant
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.report import cell
from dflash_local.bench.report.report import Report
from dflash_local.stats import Stats

_FEWEST = 3
"""Answers with drafts; from fewer no verdict is given, as speed differs between prompts."""
_ALIKE = 0.02
"""Ratios that differ from 1 by less are within the spread of two runs."""


def verdict(report: Report) -> str:
    """Whether drafting pays, at the first temperature that was measured, from empty caches."""
    return ("interrupted; so far: " if report.interrupted else "") + _verdict(report)


def _verdict(report: Report) -> str:
    first = [row for row in report.main_rows if row.temperature == report.temperatures[0]]
    means = {
        variant: mean
        for variant in report.main_variants
        if (mean := _mean([row for row in first if row.variant == variant])) is not None
    }
    if not means:
        return _plain(first)
    variant = max(means, key=means.__getitem__)
    rows = [row for row in first if row.variant == variant and row.ratio]
    n_answers = sum(row.ratio.n for row in rows if row.ratio)
    if n_answers < _FEWEST:
        answers = "answer is" if n_answers == 1 else "answers are"
        return f"{n_answers} measured {answers} too few for a verdict: give more prompts"
    stats = Stats.sum(row.acceptance.stats for row in rows)
    low, high = _bounds(rows)
    return f"{_how(means[variant], low, high, variant, stats)}{_range(rows)}"


def _mean(rows: list[SpeedRow]) -> float | None:
    ratios = [row.ratio.median for row in rows if row.ratio]
    return geometric_mean(ratios) if ratios else None


def _bounds(rows: list[SpeedRow]) -> tuple[float, float]:
    """Between which gains the categories lie, or the answers if there is one category."""
    ratios = [row.ratio for row in rows if row.ratio]
    if len(ratios) == 1:
        return ratios[0].low, ratios[0].high
    return min(ratio.median for ratio in ratios), max(ratio.median for ratio in ratios)


def _how(mean: float, low: float, high: float, variant: Variant, stats: Stats) -> str:
    speed = f"{mean:.2f} times plain decoding's speed"
    if mean > 1 + _ALIKE >= stats.tokens_per_round:  # no gain can be larger than that
        return f"drafting gains nothing, as hardly any draft was accepted: {speed} ({variant})"
    way = f"{variant}, {stats.gained_by}" if stats.gained_by else str(variant)
    if low > 1:
        return f"drafting pays: {speed} ({way})"
    if high < 1:
        return f"drafting does not pay: {speed} ({way}, the fastest way that was measured)"
    if low >= 1 - _ALIKE and high <= 1 + _ALIKE:
        return f"drafting neither gains nor costs anything: {speed} ({way})"
    return f"whether drafting pays differs between texts: {speed} in the middle ({way})"


def _range(rows: list[SpeedRow]) -> str:
    """From the worst category to the best, or the spread within the only one."""
    found = sorted((row.ratio.median, cell.name(row.category)) for row in rows if row.ratio)
    if len(found) < 2:
        low, high = _bounds(rows)
        return f", from {low:.2f} to {high:.2f}" if low < high else ""
    (low, worst), (high, best) = found[0], found[-1]
    return f", from {low:.2f} on {worst} to {high:.2f} on {best}"


def _plain(rows: list[SpeedRow]) -> str:
    speeds = [row.plain.median for row in rows if row.plain.median]
    if not speeds:
        return "no answer was long enough for a verdict: give more tokens (-n) or longer texts"
    return f"plain decoding makes {geometric_mean(speeds):.4g} tokens/s; no drafts were measured"
