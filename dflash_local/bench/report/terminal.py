"""A report on a terminal: sections, each a heading and a table."""

from __future__ import annotations

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.cost_curve import DEPTH
from dflash_local.bench.measure.environment import MemoryUse
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.measure.speed import STAGES
from dflash_local.bench.report import cell, remarks
from dflash_local.bench.report.report import Report
from dflash_local.bench.report.verdict import verdict
from dflash_local.fit.footprint import size_text

_BAR = 40
_SHORT = 16
"""Tokens: longer rounds have a row only if there were any."""
_BESIDE_BAR = 24
"""Columns of a histogram's row beside its bar."""
_DRAFTS = "a drafting round on average"
_TREES = ": drafted nodes, tokens of the longest branch, branches"
_FORCED = " (* in whole blocks)"


def terminal(report: Report, width: int | None = None) -> str:
    """All sections, in plain characters, for a terminal of so many columns; None for any number."""
    sections = [("", "\n".join(_head(report)))]
    sections.append(_speeds(report, width))
    if report.replay and len(report.main_variants) > 1:
        sections.append(("ratios of tokens/s, prompt by prompt", _ratios(report, width)))
    if report.main_variants:
        forced = _FORCED if any(row.forced for row in report.rows) else ""
        trees = _TREES if _has_trees(report) else ""
        sections.append((_DRAFTS + trees + forced, _drafts(report, width)))
        sections.append(("milliseconds a round", _stages(report, width)))
        for temperature in report.temperatures:
            for variant in report.main_variants:
                title = f"rounds by their tokens at temperature {temperature:g}, {variant}"
                is_forced = report.is_forced(temperature, variant)
                found = report.acceptance(temperature, variant)
                text = _histogram(found, width, chosen=not is_forced)
                sections.append((title + (_FORCED if is_forced else ""), text))
    if report.concurrency:
        sections.append(("several requests at once, tokens/s", _concurrent(report, width)))
    if report.server:
        rows = [cell.server(row) for row in report.server]
        sections.append(("llama-server on the same files and prompts", cell.table(rows, width)))
    if report.curve:
        title = f"a pass of the target by its rows, after {DEPTH} tokens"
        curve = {"rows": "ms", **{str(n): cell.ms(s) for n, s in report.curve.items()}}
        sections.append((title, cell.table([curve], width)))
    if report.memory:
        sections.append(("memory", _memory(report.memory)))
    sections.append(("", "\n".join(remarks.tail(report))))
    blocks = [f"{title}\n{text}" if title else text for title, text in sections if text]
    return "\n\n".join(blocks) + "\n"


def _head(report: Report) -> list[str]:
    settings = report.settings
    times = "once" if settings.repeat == 1 else f"{settings.repeat} times"
    return [
        verdict(report),
        "",
        remarks.models(report.environment),
        remarks.place(report.environment),
        f"answers of up to {settings.max_tokens} tokens, each prompt {times}, after a warm-up; "
        f"seed {settings.seed}",
        *remarks.validity(report),
    ]


def _speeds(report: Report, width: int | None) -> tuple[str, str]:
    """The heading, and the table: without spreads where there is no room for them."""
    rows: list[cell.Row] = []
    for row in report.rows:
        line = {
            "prompts": f"{cell.name(row.category)} ({row.n_prompts})",
            "temp": f"{row.temperature:g}",
            "caches": row.cache,
            "plain": cell.spread(row.plain.tokens_per_second),
        }
        first_tokens = [row.plain.ttft_s]
        if row.drafted:
            if len(report.settings.variants) > 1:
                line["drafts"] = str(row.variant)
            line["drafted"] = cell.spread(row.drafted.tokens_per_second)
            line["ratio"] = cell.ratio(row.ratio)
            line["tokens per round"] = cell.accepted(row)
            if report.paper:
                paper = report.paper.get((row.category, row.temperature))
                line["paper"] = cell.paper(paper if row.cache == "cold" else None)
            first_tokens.append(row.drafted.ttft_s)
        line["first token, ms"] = " / ".join(cell.ms(each.median) for each in first_tokens if each)
        rows.append(line)
    title = "tokens/s: median (middle half), each prompt plain and drafted in turn"
    if not cell.fits(rows, width):
        rows = cell.without_spreads(rows)
        title = "tokens/s: median, each prompt plain and drafted in turn"
    return title, cell.table(rows, width)


def _ratios(report: Report, width: int | None) -> str:
    """Each of the main variants over plain decoding, and over the others."""
    rows = []
    for row in report.main_rows:
        over = {f"over {other}": cell.ratio(row.over.get(other)) for other in report.main_variants}
        over.pop(f"over {row.variant}", None)
        line = {"prompts": cell.name(row.category), "temp": f"{row.temperature:g}"}
        rows.append(
            {**line, "drafts": str(row.variant), "over plain": cell.ratio(row.ratio), **over}
        )
    return cell.table(rows, width)


def _drafting_rows(report: Report) -> list[SpeedRow]:
    return [row for row in report.rows if row.cache == "cold" and row.drafted]


def _drafts(report: Report, width: int | None) -> str:
    """What a drafting round verified, and what of it was kept."""
    rows = []
    has_trees = _has_trees(report)
    for row in _drafting_rows(report):
        line = {
            "prompts": cell.name(row.category),
            "temp": f"{row.temperature:g}",
            "drafts": str(row.variant),
            "nodes" if has_trees else "drafted": cell.decimal(row.shown.nodes),
        }
        if has_trees:
            line["depth"] = cell.decimal(row.shown.depth)
            line["branches"] = cell.decimal(row.shown.branches)
            line["kept a side branch"] = cell.share(row.shown.side_share)
        line["tokens per round"] = cell.accepted(row)
        rows.append(line)
    return cell.table(rows, width)


def _has_trees(report: Report) -> bool:
    return any(variant.shape != "chain" for variant in report.settings.variants)


def _stages(report: Report, width: int | None) -> str:
    """At the first temperature."""
    rows = []
    for row in _drafting_rows(report):
        if row.temperature != report.temperatures[0] or not row.drafted:
            continue
        plain, stages = row.plain.stage_s, row.drafted.stage_s
        rows.append(
            {
                "prompts": cell.name(row.category),
                "drafts": str(row.variant),
                "plain round": cell.ms(sum(plain.values())) if plain else "",
                "drafted round": cell.ms(sum(stages.values())) if stages else "",
                **{name: cell.ms(stages[name]) if stages else "" for name in STAGES},
            }
        )
    return cell.table(rows, width)


def _histogram(acceptance: Acceptance, width: int | None, *, chosen: bool) -> str:
    """Rounds by tokens emitted; beside it how often the last draft of such a round was kept.

    `chosen`: the controller chose the widths, so that they are worth telling.
    """
    lengths, total = acceptance.lengths, acceptance.n_rounds
    if not total:
        return "no drafts were checked"
    longest = _BAR if width is None else max(4, min(_BAR, width - _BESIDE_BAR))
    drafted, kept = acceptance.stats.position_drafted, acceptance.by_position
    rows = []
    for length in range(1, max(lengths) + 1):
        n = lengths.get(length, 0)
        if not n and length > _SHORT:
            continue
        tried = 2 <= length <= len(kept) + 1 and drafted[length - 2]
        rows.append(
            {
                "tokens": str(length),
                "rounds": cell.share(n / total),
                "": "#" * (max(1, round(longest * n / max(lengths.values()))) if n else 0),
                "draft kept": cell.share(kept[length - 2]) if tried else "",
            }
        )
    mean = f"mean {cell.length(acceptance)} tokens in {total} rounds"
    used = [f"{width}: {n}" for width, n in acceptance.stats.widths.items() if width > 1]
    mean += f"; rounds by rows verified: {', '.join(used)}" if chosen and used else ""
    return f"{cell.table(rows)}\n{mean}"


def _concurrent(report: Report, width: int | None) -> str:
    rows = []
    for row in report.concurrency:
        line = {
            "prompts": cell.name(row.category),
            "temp": f"{row.temperature:g}",
            "at once": str(row.concurrency),
            "plain": cell.spread(row.plain.total),
            "each": cell.rate(row.plain.speed),
        }
        if row.drafted:
            line["drafts"] = str(row.variant)
            line["drafted"] = cell.spread(row.drafted.total)
            line["each, drafted"] = cell.rate(row.drafted.speed)
            line["ratio"] = cell.ratio(row.ratio)
            line["tokens per round"] = cell.length(row.drafted.acceptance)
        rows.append(line)
    return cell.table(rows, width)


def _memory(memory: MemoryUse) -> str:
    parts = [
        f"target {size_text(memory.target)}, its cache {size_text(memory.target_cache)}, "
        f"buffers {size_text(memory.compute)}"
    ]
    if memory.drafter:
        parts.append(
            f"drafter {size_text(memory.drafter)}, its cache {size_text(memory.drafter_cache)} now "
            f"and at most {size_text(memory.drafter_cache_limit)}"
        )
    return "; ".join(parts)
