"""A report as Markdown, in the form of the published model cards: tokens/s, speed-up and accepted
length by task and concurrency, and the command beside it."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_local.bench.measure.concurrent import ConcurrencyRow
from dflash_local.bench.measure.settings import PLAIN
from dflash_local.bench.measure.single import SpeedRow
from dflash_local.bench.report import cell, remarks
from dflash_local.bench.report.verdict import verdict
from lab.bench.report import LabReport, server_cells, tail, validity


def markdown(report: LabReport) -> str:
    environment = report.environment
    lines = [f"### {remarks.models(environment)}", "", f"**{verdict(report)}**", ""]
    lines += [f"{remarks.place(environment)}. Measured with:", ""]
    lines += ["```sh", report.command, "```", ""]
    for line in validity(report):
        lines += [line, ""]
    lines += [cell.pipe_table(list(_rows(report))), ""]
    if report.server:
        lines += [cell.pipe_table([server_cells(row) for row in report.server]), ""]
    lines += [f"- {line}" for line in tail(report)]
    return "\n".join(lines).rstrip() + "\n"


def _rows(report: LabReport) -> Iterator[cell.Row]:
    """One request at a time, then several at once."""
    for row in report.main_rows:
        line = _line(report, row, 1, cell.rate(row.plain))
        if row.drafted:
            line["drafted tokens/s"] = cell.rate(row.drafted)
            line["speed-up"] = cell.ratio(row.ratio)
            line["tokens per round"] = cell.accepted(row)
            if report.paper:
                line["paper"] = cell.paper(report.paper.get((row.category, row.temperature)))
        yield line
    for many in report.concurrency:
        if many.concurrency > 1 and many.variant in (report.main_variants or [PLAIN]):
            line = _line(
                report, many, many.concurrency, f"{many.plain.total_tokens_per_second.median:.4g}"
            )
            if many.drafted:
                line["drafted tokens/s"] = f"{many.drafted.total_tokens_per_second.median:.4g}"
                line["speed-up"] = cell.ratio(many.ratio)
                line["tokens per round"] = cell.length(many.drafted.acceptance)
            yield line


def _line(report: LabReport, row: SpeedRow | ConcurrencyRow, n: int, plain: str) -> dict[str, str]:
    line = {
        "task": cell.name(row.category),
        "temperature": f"{row.temperature:g}",
        "concurrency": str(n),
        "plain tokens/s": plain,
    }
    if row.drafted and len(report.main_variants) > 1:
        line["drafts"] = str(row.variant)
    return line
