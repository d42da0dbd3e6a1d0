"""A report with all its sections on a terminal, each a heading and a table."""

from __future__ import annotations

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.measure.speed import STAGES
from dflash_local.bench.report import cell
from dflash_local.bench.report.terminal import head, speeds
from dflash_local.fit.footprint import size_text
from lab.bench.cost_curve import DEPTH
from lab.bench.memory import MemoryUse
from lab.bench.report import LabReport, server_cells, tail, validity

_BAR = 40
_SHORT = 16
"""Tokens: longer rounds have a row only if there were any."""
_BESIDE_BAR = 24
"""Columns of a histogram's row beside its bar."""
_DRAFTS = "a drafting round on average"
_TREES = ": drafted nodes, tokens of the longest branch, branches"
_FORCED = " (* in whole blocks)"


def terminal(report: LabReport, width: int | None = None) -> str:
    """All sections, in plain characters, for a terminal of so many columns; None for any number."""
    sections = [("", "\n".join([*head(report), *validity(report)]))]
    sections.append(("", speeds(report, width)))
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
    if report.server:
        rows = [server_cells(row) for row in report.server]
        sections.append(("llama-server on the same files and prompts", cell.table(rows, width)))
    if report.curve:
        title = f"a pass of the target by its rows, after {DEPTH} tokens"
        curve = {"rows": "ms", **{str(n): cell.ms(s) for n, s in report.curve.items()}}
        sections.append((title, cell.table([curve], width)))
    if report.memory:
        sections.append(("memory", _memory(report.memory)))
    sections.append(("", "\n".join(tail(report))))
    blocks = [f"{title}\n{text}" if title else text for title, text in sections if text]
    return "\n\n".join(blocks) + "\n"


def _ratios(report: LabReport, width: int | None) -> str:
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


def _drafting_rows(report: LabReport) -> list[SpeedRow]:
    return [row for row in report.rows if row.cache == "cold" and row.drafted]


def _drafts(report: LabReport, width: int | None) -> str:
    """A table of the nodes that drafting rounds verified and kept."""
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
            line["kept a side branch"] = _share(row.shown.side_share)
        line["tokens per round"] = cell.accepted(row)
        rows.append(line)
    return cell.table(rows, width)


def _has_trees(report: LabReport) -> bool:
    return any(variant.shape != "chain" for variant in report.settings.variants)


def _stages(report: LabReport, width: int | None) -> str:
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
                "rounds": _share(n / total),
                "": "#" * (max(1, round(longest * n / max(lengths.values()))) if n else 0),
                "draft kept": _share(kept[length - 2]) if tried else "",
            }
        )
    mean = f"mean {cell.length(acceptance)} tokens in {total} rounds"
    used = [f"{width}: {n}" for width, n in acceptance.stats.widths.items() if width > 1]
    mean += f"; rounds by rows verified: {', '.join(used)}" if chosen and used else ""
    return f"{cell.table(rows)}\n{mean}"


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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
