"""A report as Markdown, in the form of the published model cards: tokens/s, speed-up and accepted
length by task and concurrency, and the command beside it."""

from __future__ import annotations

from dflash_local.bench.measure.settings import PLAIN
from dflash_local.bench.report import cell, remarks
from dflash_local.bench.report.report import Report
from dflash_local.bench.report.verdict import verdict


def markdown(report: Report) -> str:
    environment = report.environment
    lines = [f"### {remarks.models(environment)}", "", f"**{verdict(report)}**", ""]
    lines += [f"{remarks.place(environment)}. Measured with:", ""]
    lines += ["```sh", report.command, "```", ""]
    for line in remarks.validity(report):
        lines += [line, ""]
    lines += [cell.pipe_table([*_single(report), *_concurrent(report)]), ""]
    if report.server:
        lines += [cell.pipe_table([cell.server(row) for row in report.server]), ""]
    lines += [f"- {line}" for line in remarks.tail(report)]
    return "\n".join(lines).rstrip() + "\n"


def _single(report: Report) -> list[dict[str, str]]:
    rows = []
    for row in report.main_rows:
        line = {
            "task": cell.name(row.category),
            "temperature": f"{row.temperature:g}",
            "concurrency": "1",
            "plain tokens/s": cell.rate(row.plain),
        }
        if row.drafted:
            if len(report.main_variants) > 1:
                line["drafts"] = str(row.variant)
            line["drafted tokens/s"] = cell.rate(row.drafted)
            line["speed-up"] = cell.ratio(row.ratio)
            line["tokens per round"] = cell.accepted(row)
            if report.paper:
                line["paper"] = cell.paper(report.paper.get((row.category, row.temperature)))
        rows.append(line)
    return rows


def _concurrent(report: Report) -> list[dict[str, str]]:
    rows = []
    for row in report.concurrency:
        if row.n == 1 or row.variant not in (report.main_variants or [PLAIN]):
            continue
        line = {
            "task": cell.name(row.category),
            "temperature": f"{row.temperature:g}",
            "concurrency": str(row.n),
            "plain tokens/s": f"{row.plain.total.median:.4g}",
        }
        if row.drafted:
            if len(report.main_variants) > 1:
                line["drafts"] = str(row.variant)
            line["drafted tokens/s"] = f"{row.drafted.total.median:.4g}"
            line["speed-up"] = cell.ratio(row.ratio)
            line["tokens per round"] = cell.length(row.drafted.acceptance)
        rows.append(line)
    return rows
