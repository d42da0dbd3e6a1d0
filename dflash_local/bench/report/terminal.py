"""A report as people read it: on a terminal, and as Markdown in the form of the published cards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from dflash_local.bench.measure.environment import Machine
from dflash_local.bench.measure.single import Row
from dflash_local.bench.measure.speed import CURVE_DEPTH, PLAIN, STAGES, Acceptance
from dflash_local.bench.report import cell as cells
from dflash_local.bench.report.gain import gains
from dflash_local.bench.report.report import Report, temperatures_of
from dflash_local.fit.footprint import size_text

_BAR = 40
_INVALID = (
    "text: invalid. Drafts were accepted as those of another pair had been, {:g} tokens a round of "
    "whole chains; speed is real, acceptance is not"
)
_NO_DRAFTS = "no drafts were checked"
_DRAFTS = "a drafting round on average: drafted nodes, tokens of the longest branch, branches"
_FORCED = " (* whole blocks, asked for where plain decoding was faster)"


def terminal(report: Report) -> str:
    """All sections, each a heading and a table, in plain characters."""
    sections: list[tuple[str, str]] = [("", "\n".join(_head(report)))]
    sections.append(
        ("tokens/s: median (middle half), each prompt plain and drafted in turn", _speeds(report))
    )
    if report.main_ways:
        sections.append((_DRAFTS + (_FORCED if report.has_forced else ""), _drafts(report)))
        sections.append(("milliseconds a round", _stages(report)))
        for temperature in temperatures_of(report.rows):
            for way in report.main_ways:
                title = f"accepted lengths at temperature {temperature:g}, {way}"
                forced = report.is_forced(temperature, way)
                text = _histogram(report.acceptance(temperature, way), chosen=not forced)
                sections.append((title + (_FORCED if forced else ""), text))
    if report.concurrency:
        sections.append(("several requests at once, tokens/s", _together(report)))
    if report.peer:
        sections.append(("llama-server on the same files and prompts", _peer(report)))
    if report.curve:
        sections.append(
            (f"a pass of the target by its rows, after {CURVE_DEPTH} tokens", _curve(report))
        )
    if report.memory:
        sections.append(("memory", _memory(report)))
    sections.append(("", "\n".join(_tail(report))))
    blocks = [f"{title}\n{text}" if title else text for title, text in sections if text]
    return "\n\n".join(blocks) + "\n"


def markdown(report: Report) -> str:
    """Task by concurrency: tokens/s, speed-up and accepted length; and the command beside it."""
    lines = [f"### {_models(report.machine)}", "", f"{_place(report.machine)}. Measured with:", ""]
    lines += ["```sh", report.command, "```", ""]
    if report.synthetic_length is not None:
        lines += [_INVALID.format(report.synthetic_length), ""]
    lines += [tabulate(_card(report), headers="keys", tablefmt="pipe", disable_numparse=True), ""]
    if report.peer:
        rows = list(_peer_rows(report))
        lines += [tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True), ""]
    lines += [f"- {line}" for line in _tail(report)]
    return "\n".join(lines).rstrip() + "\n"


# Sections


def _head(report: Report) -> Iterator[str]:
    settings = report.settings
    yield _models(report.machine)
    yield _place(report.machine)
    yield (
        f"answers of up to {settings.max_tokens} tokens, each prompt {_times(settings.repeat)}, "
        f"after a warm-up; seed {settings.seed}"
    )
    if report.synthetic_length is not None:
        yield _INVALID.format(report.synthetic_length)


def _models(machine: Machine) -> str:
    return f"{machine.target} with {machine.drafter}" if machine.drafter else machine.target


def _place(machine: Machine) -> str:
    threads = f"{machine.n_threads} thread{'s' if machine.n_threads > 1 else ''}"
    return (
        f"{', '.join(machine.devices)}; {threads}; context {machine.n_ctx}, {machine.kv_type} KV "
        f"cache; dflash-local {machine.version}, {machine.llama_cpp}"
    )


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _speeds(report: Report) -> str:
    rows = []
    for row in report.rows:
        line: dict[str, Any] = {
            "prompts": f"{cells.name(row.category)} ({row.n_prompts})",
            "temp": f"{row.temperature:g}",
            "caches": row.cache,
            "plain": cells.spread(row.plain.tokens_per_second),
        }
        if row.drafted:
            if len(report.settings.ways) > 1:
                line["drafts"] = str(row.way)
            line["drafted"] = cells.spread(row.drafted.tokens_per_second)
            line["ratio"] = cells.ratio(row.ratio)
            line["accepted"] = cells.accepted(row)
            if report.paper:
                paper = report.paper.get((row.category, row.temperature))
                line["paper"] = cells.paper(paper) if paper and row.cache == "cold" else ""
        line["first token, ms"] = _first_token(row)
        rows.append(line)
    return cells.table(rows, right=("plain", "drafted", "ratio", "accepted", "first token, ms"))


def _first_token(row: Row) -> str:
    found = [row.plain.ttft_s, row.drafted.ttft_s if row.drafted else None]
    return " / ".join(f"{1000 * spread.median:.3g}" for spread in found if spread)


def _drafts(report: Report) -> str:
    """What a drafting round verified, and kept of it."""
    rows = []
    for row in (row for row in report.rows if row.cache == "cold" and row.drafted):
        found = row.shown
        share = found.side_share
        rows.append(
            {
                "prompts": cells.name(row.category),
                "temp": f"{row.temperature:g}",
                "drafts": str(row.way),
                "nodes": cells.decimal(found.nodes),
                "depth": cells.decimal(found.depth),
                "branches": cells.decimal(found.branches),
                "kept a side branch": "-" if share is None else f"{100 * share:.0f} %",
                "accepted": cells.accepted(row),
            }
        )
    return cells.table(rows, right=tuple(rows[0])[3:]) if rows else ""


def _stages(report: Report) -> str:
    rows = []
    for row in (row for row in report.rows if row.cache == "cold" and row.drafted):
        if row.temperature != report.rows[0].temperature or not row.drafted:
            continue
        plain, stages = row.plain.stage_s, row.drafted.stage_s
        line: dict[str, Any] = {
            "prompts": cells.name(row.category),
            "drafts": str(row.way),
            "plain round": cells.ms(sum(plain.values())) if plain else "",
            "drafted round": cells.ms(sum(stages.values())) if stages else "",
        }
        line |= {name: cells.ms(stages[name]) if stages else "" for name in STAGES}
        rows.append(line)
    return cells.table(rows, right=("plain round", "drafted round", *STAGES))


def _histogram(acceptance: Acceptance, *, chosen: bool) -> str:
    """Rounds by tokens emitted; beside it how often the draft that makes it so long was kept.

    `chosen`: the widths were the controller's, and tell something.
    """
    total = sum(acceptance.lengths.values())
    if not total:
        return _NO_DRAFTS
    most = max(acceptance.lengths.values())
    kept = acceptance.by_position
    rows = []
    for length in range(1, max(acceptance.lengths) + 1):
        n = acceptance.lengths.get(length, 0)
        line: dict[str, Any] = {
            "tokens": length,
            "rounds": f"{100 * n / total:.0f} %",
            "": "#" * (max(1, round(_BAR * n / most)) if n else 0),
        }
        if kept:
            tried = 2 <= length <= len(kept) + 1 and acceptance.drafted[length - 2]
            line["draft kept"] = f"{100 * kept[length - 2]:.0f} %" if tried else ""
        rows.append(line)
    mean = f"mean {cells.length(acceptance)} tokens in {total} rounds"
    used = [f"{width}: {n}" for width, n in acceptance.widths.items() if width > 1]
    mean += f"; rounds by rows verified: {', '.join(used)}" if chosen and used else ""
    return f"{cells.table(rows, right=('tokens', 'rounds', 'draft kept'))}\n{mean}"


def _together(report: Report) -> str:
    rows = []
    for row in report.concurrency:
        line: dict[str, Any] = {
            "prompts": cells.name(row.category),
            "temp": f"{row.temperature:g}",
            "at once": row.n,
            "plain": cells.spread(row.plain.total),
            "each": cells.median(row.plain.speed.tokens_per_second),
        }
        if row.drafted:
            line["drafts"] = str(row.way)
            line["drafted"] = cells.spread(row.drafted.total)
            line["each, drafted"] = cells.median(row.drafted.speed.tokens_per_second)
            line["ratio"] = cells.ratio(row.ratio)
            line["accepted"] = cells.length(row.drafted.acceptance)
        rows.append(line)
    return cells.table(rows, right=tuple(rows[0])[2:])


def _peer(report: Report) -> str:
    rows = list(_peer_rows(report))
    return cells.table(rows, right=tuple(rows[0])[2:-1]) if rows else ""


def _peer_rows(report: Report) -> Iterator[dict[str, Any]]:
    for row in report.peer:
        yield {
            "prompts": cells.name(row.category),
            "llama-server": f"DFlash, {row.n_drafts} drafts" if row.n_drafts else "plain",
            "temp": f"{row.temperature:g}",
            "at once": row.concurrency,
            "tokens/s": cells.spread(row.tokens_per_second),
            "accepted": "" if row.accepted_length is None else f"{row.accepted_length:.2f}",
            "ours (over theirs)": ", ".join(
                f"{way}: {speed:.4g} ({speed / row.tokens_per_second.median:.2f})"
                for way, speed in row.ours.items()
            ),
        }


def _curve(report: Report) -> str:
    rows = ["rows", *map(str, report.curve)]
    costs = ["ms", *map(cells.ms, report.curve.values())]
    return tabulate([rows, costs], tablefmt="plain", disable_numparse=True, stralign="right")


def _memory(report: Report) -> str:
    memory = report.memory
    assert memory is not None
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


def _tail(report: Report) -> Iterator[str]:
    if report.n_compared:
        yield _sameness(report)
    for gain in gains(report.rows):
        yield gain.text()
    yield from _reasons(report)
    for source in dict.fromkeys(value.source for value in report.paper.values()):
        yield f"paper: {source}; its speed-up is that of another program and machine"
    for note in report.notes:
        yield f"note: {note}"


def _reasons(report: Report) -> Iterator[str]:
    """What the controller says of its choices, each once, with the categories it says it of."""
    said: dict[str, list[str]] = {}
    for row in report.main_rows():
        if row.temperature == report.rows[0].temperature:
            texts = [f"{row.way}: {row.drafting}"] if row.drafting else []
            for text in [*texts, *row.warnings]:
                said.setdefault(text, []).append(cells.name(row.category))
    for text, categories in said.items():
        yield f"{text} ({', '.join(categories)})"
    if any(row.forced for row in report.main_rows()):
        yield "* accepted where whole blocks are drafted; the width chosen was plain decoding"


def _sameness(report: Report) -> str:
    differing = report.differences
    if not differing:
        return f"greedy answers with drafts: all {report.n_compared} equal plain decoding's"
    beyond = [d for d in differing if not d.lead.is_within_rounding]
    text = (
        f"greedy answers with drafts: {len(differing)} of {report.n_compared} part from plain "
        "decoding's, "
    )
    if not beyond:
        return text + "each where the likeliest two tokens are within rounding of each other"
    worst = max(beyond, key=lambda d: d.lead.gap - 2 * d.lead.noise)
    return text + (
        f"{len(beyond)} of them where rounding does not explain it: {worst.case.category} "
        f"{worst.case.index + 1}, token {worst.at + 1}, lead {worst.lead.gap:.3g}, rounding "
        f"{worst.lead.noise:.3g}"
    )


def _card(report: Report) -> list[dict[str, Any]]:
    rows = []
    for row in report.main_rows():
        line: dict[str, Any] = {
            "task": cells.name(row.category),
            "temperature": f"{row.temperature:g}",
            "concurrency": 1,
            "plain tokens/s": cells.median(row.plain.tokens_per_second),
        }
        if row.drafted:
            if len(report.main_ways) > 1:
                line["drafts"] = str(row.way)
            line["drafted tokens/s"] = cells.median(row.drafted.tokens_per_second)
            line["speed-up"] = cells.ratio(row.ratio)
            line["accepted length"] = cells.accepted(row)
            if report.paper:
                paper = report.paper.get((row.category, row.temperature))
                line["paper"] = cells.paper(paper) if paper else ""
        rows.append(line)
    for many in report.concurrency:
        if many.n > 1 and many.way in (report.main_ways or [PLAIN]):
            line = {
                "task": cells.name(many.category),
                "temperature": f"{many.temperature:g}",
                "concurrency": many.n,
                "plain tokens/s": cells.median(many.plain.total),
            }
            if many.drafted:
                if len(report.main_ways) > 1:
                    line["drafts"] = str(many.way)
                line["drafted tokens/s"] = cells.median(many.drafted.total)
                line["speed-up"] = cells.ratio(many.ratio)
                line["accepted length"] = cells.length(many.drafted.acceptance)
            rows.append(line)
    return rows
