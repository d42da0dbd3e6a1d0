"""A report on a terminal: a verdict, one table, and remarks."""

from dflash_local.bench.measure.concurrent import ConcurrencyRow
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.report import cell, remarks
from dflash_local.bench.report.report import Report
from dflash_local.bench.report.verdict import verdict

_TITLE = "tokens/s: median{}, each prompt plain and drafted in turn"


def terminal(report: Report, width: int | None = None) -> str:
    """In plain characters, for a terminal of so many columns; None for any number."""
    blocks = ["\n".join(head(report)), speeds(report, width), "\n".join(remarks.tail(report))]
    return "\n\n".join(filter(None, blocks)) + "\n"


def head(report: Report) -> list[str]:
    settings = report.settings
    times = "once" if settings.repeat == 1 else f"{settings.repeat} times"
    return [
        verdict(report),
        "",
        remarks.models(report.environment),
        remarks.place(report.environment),
        f"answers of up to {settings.max_tokens} tokens, each prompt {times}, after a warm-up; "
        f"seed {settings.seed}",
    ]


def speeds(report: Report, width: int | None) -> str:
    """The table with its heading, without spreads where there is no room for them."""
    rows = [_single(report, row) for row in report.rows]
    rows += [_at_once(report, row) for row in report.concurrency if row.concurrency > 1]
    if cell.fits(rows, width):
        return f"{_TITLE.format(' (middle half)')}\n{cell.table(rows, width)}"
    return f"{_TITLE.format('')}\n{cell.table(cell.without_spreads(rows), width)}"


def _single(report: Report, row: SpeedRow) -> cell.Row:
    line = _about(report, row, f"{cell.name(row.category)} ({row.n_prompts})", 1)
    line["plain"] = cell.spread(row.plain.tokens_per_second)
    first_tokens = [row.plain.ttft_s]
    if row.drafted:
        line["drafted"] = cell.spread(row.drafted.tokens_per_second)
        line["ratio"] = cell.ratio(row.ratio)
        line["tokens per round"] = cell.accepted(row)
        if report.paper:
            paper = report.paper.get((row.category, row.temperature))
            line["paper"] = cell.paper(paper if row.cache == "cold" else None)
        first_tokens.append(row.drafted.ttft_s)
    line["first token, ms"] = " / ".join(cell.ms(each.median) for each in first_tokens if each)
    return line


def _at_once(report: Report, row: ConcurrencyRow) -> cell.Row:
    line = _about(report, row, cell.name(row.category), row.concurrency)
    line["plain"] = cell.spread(row.plain.total_tokens_per_second)
    if row.drafted:
        line["drafted"] = cell.spread(row.drafted.total_tokens_per_second)
        line["ratio"] = cell.ratio(row.ratio)
        line["tokens per round"] = cell.length(row.drafted.acceptance)
    return line


def _about(
    report: Report, row: SpeedRow | ConcurrencyRow, prompts: str, n_at_once: int
) -> dict[str, str]:
    """The columns with the subject of a row: those in which rows differ."""
    line = {"prompts": prompts, "temp": f"{row.temperature:g}"}
    if len(report.settings.caches) > 1:
        line["caches"] = row.cache if isinstance(row, SpeedRow) else ""
    if report.concurrency:
        line["at once"] = str(n_at_once)
    if row.drafted and len(report.settings.variants) > 1:
        line["drafts"] = str(row.variant)
    return line
