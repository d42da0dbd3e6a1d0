"""A report as people read it: on a terminal, and as Markdown in the form of the published cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tabulate import tabulate

from dflash_local.bench.machine import Machine
from dflash_local.bench.measure import CURVE_DEPTH, STAGES, Acceptance, Spread
from dflash_local.bench.report import PaperValue, Report, temperatures_of
from dflash_local.bench.run import Row
from dflash_local.memory import size_text

_BAR = 40
_INVALID = (
    "text: invalid. Drafts were accepted at random, {:g} tokens a round on average where the width "
    "allows; speed is real, acceptance is not"
)
_NAMES = {"fim": "fill-in-the-middle"}
_NO_DRAFTS = "no drafts were checked"
_FORCED = " (* whole blocks, asked for where plain decoding was faster)"


def terminal(report: Report) -> str:
    """All sections, each a heading and a table, in plain characters."""
    sections: list[tuple[str, str]] = [("", "\n".join(_head(report)))]
    sections.append(
        ("tokens/s: median (middle half), each prompt plain and drafted in turn", _speeds(report))
    )
    if report.main_width is not None:
        sections.append(("milliseconds a round", _stages(report)))
        for temperature in temperatures_of(report.rows):
            title = f"accepted lengths at temperature {temperature:g}, width {report.main_width}"
            forced = report.is_forced(temperature)
            text = _histogram(report.acceptance(temperature), chosen=not forced)
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
    drafted = report.main_width is not None
    rows = []
    for row in report.rows:
        cells: dict[str, Any] = {
            "prompts": f"{_NAMES.get(row.category, row.category)} ({row.n_prompts})",
            "temp": f"{row.temperature:g}",
            "caches": row.cache,
            "plain": _spread(row.plain.tokens_per_second),
        }
        if drafted and row.drafted:
            if len(report.settings.widths) > 1:
                cells["width"] = row.width
            cells["drafted"] = _spread(row.drafted.tokens_per_second)
            cells["ratio"] = _ratio(row.ratio)
            cells["accepted"] = _accepted(row)
            if report.paper:
                paper = report.paper.get((row.category, row.temperature))
                cells["paper"] = _paper(paper) if paper and row.cache == "cold" else ""
        cells["first token, ms"] = _first_token(row)
        rows.append(cells)
    return _table(rows, right=("plain", "drafted", "ratio", "accepted", "first token, ms"))


def _first_token(row: Row) -> str:
    found = [row.plain.ttft_s, row.drafted.ttft_s if row.drafted else None]
    return " / ".join(f"{1000 * spread.median:.3g}" for spread in found if spread)


def _stages(report: Report) -> str:
    rows = []
    for row in (row for row in report.rows if row.cache == "cold" and row.drafted):
        if row.temperature != report.rows[0].temperature or not row.drafted:
            continue
        plain, stages = row.plain.stage_s, row.drafted.stage_s
        cells: dict[str, Any] = {
            "prompts": _NAMES.get(row.category, row.category),
            "width": row.width,
            "plain round": _ms(sum(plain.values())) if plain else "",
            "drafted round": _ms(sum(stages.values())) if stages else "",
        }
        cells |= {name: _ms(stages[name]) if stages else "" for name in STAGES}
        rows.append(cells)
    return _table(rows, right=("plain round", "drafted round", *STAGES))


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
        cells: dict[str, Any] = {
            "tokens": length,
            "rounds": f"{100 * n / total:.0f} %",
            "": "#" * (max(1, round(_BAR * n / most)) if n else 0),
        }
        if kept:
            tried = 2 <= length <= len(kept) + 1 and acceptance.drafted[length - 2]
            cells["draft kept"] = f"{100 * kept[length - 2]:.0f} %" if tried else ""
        rows.append(cells)
    mean = f"mean {_length(acceptance)} tokens in {total} rounds"
    used = [f"{width}: {n}" for width, n in acceptance.widths.items() if width > 1]
    mean += f"; rounds by rows verified: {', '.join(used)}" if chosen and used else ""
    if trees := acceptance.tree_rounds:
        mean += (
            f"; {trees} rounds with trees of {acceptance.leaves / trees:.1f} branches, of which "
            f"{100 * acceptance.side_rounds / trees:.0f} % kept another than the first"
        )
    return f"{_table(rows, right=('tokens', 'rounds', 'draft kept'))}\n{mean}"


def _together(report: Report) -> str:
    rows = []
    for row in report.concurrency:
        cells: dict[str, Any] = {
            "prompts": _NAMES.get(row.category, row.category),
            "temp": f"{row.temperature:g}",
            "at once": row.n,
            "plain": _spread(row.plain.total),
            "each": _median(row.plain.speed.tokens_per_second),
        }
        if row.drafted:
            cells["width"] = row.width
            cells["drafted"] = _spread(row.drafted.total)
            cells["each, drafted"] = _median(row.drafted.speed.tokens_per_second)
            cells["ratio"] = _ratio(row.ratio)
            cells["accepted"] = _length(row.drafted.acceptance)
        rows.append(cells)
    return _table(rows, right=tuple(rows[0])[2:])


def _peer(report: Report) -> str:
    rows = list(_peer_rows(report))
    return _table(rows, right=tuple(rows[0])[2:]) if rows else ""


def _peer_rows(report: Report) -> Iterator[dict[str, Any]]:
    for row in report.peer:
        yield {
            "prompts": _NAMES.get(row.category, row.category),
            "llama-server": f"DFlash, {row.n_drafts} drafts" if row.n_drafts else "plain",
            "temp": f"{row.temperature:g}",
            "at once": row.concurrency,
            "tokens/s": _spread(row.tokens_per_second),
            "accepted": "" if row.accepted_length is None else f"{row.accepted_length:.2f}",
            "ours": "" if row.ours is None else f"{row.ours:.4g}",
            "ours over theirs": "" if row.ratio is None else f"{row.ratio:.2f}",
        }


def _curve(report: Report) -> str:
    rows = ["rows", *map(str, report.curve)]
    costs = ["ms", *map(_ms, report.curve.values())]
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
            texts = [f"{report.main_width}: {row.drafting}"] if row.drafting else []
            for text in [*texts, *row.warnings]:
                said.setdefault(text, []).append(_NAMES.get(row.category, row.category))
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
        cells: dict[str, Any] = {
            "task": _NAMES.get(row.category, row.category),
            "temperature": f"{row.temperature:g}",
            "concurrency": 1,
            "plain tokens/s": _median(row.plain.tokens_per_second),
        }
        if row.drafted:
            cells["drafted tokens/s"] = _median(row.drafted.tokens_per_second)
            cells["speed-up"] = _ratio(row.ratio)
            cells["accepted length"] = _accepted(row)
            if report.paper:
                paper = report.paper.get((row.category, row.temperature))
                cells["paper"] = _paper(paper) if paper else ""
        rows.append(cells)
    for many in report.concurrency:
        if many.n > 1 and many.width == (report.main_width or 0):
            cells = {
                "task": _NAMES.get(many.category, many.category),
                "temperature": f"{many.temperature:g}",
                "concurrency": many.n,
                "plain tokens/s": _median(many.plain.total),
            }
            if many.drafted:
                cells["drafted tokens/s"] = _median(many.drafted.total)
                cells["speed-up"] = _ratio(many.ratio)
                cells["accepted length"] = _length(many.drafted.acceptance)
            rows.append(cells)
    return rows


# Cells


def _table(rows: Sequence[dict[str, Any]], *, right: Sequence[str]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in columns] for row in rows]
    align = ["right" if name in right else "left" for name in columns]
    return tabulate(cells, columns, tablefmt="simple", disable_numparse=True, colalign=tuple(align))


def _spread(found: Spread | None) -> str:
    return _with_range(found, ".4g")


def _ratio(found: Spread | None) -> str:
    return _with_range(found, ".2f")


def _with_range(found: Spread | None, form: str) -> str:
    if found is None:
        return "-"
    if found.n == 1:
        return f"{found.median:{form}}"
    return f"{found.median:{form}} ({found.low:{form}}-{found.high:{form}})"


def _median(found: Spread | None) -> str:
    return f"{found.median:.4g}" if found else "-"


def _accepted(row: Row) -> str:
    return _length(row.shown) + ("*" if row.forced else "")


def _length(found: Acceptance) -> str:
    return "-" if found.mean_length is None else f"{found.mean_length:.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def _paper(value: PaperValue) -> str:
    parts = []
    if value.speed_up is not None:
        parts.append(f"{value.speed_up:.2f}x")
    if value.accepted_length is not None:
        parts.append(f"{value.accepted_length:.2f} accepted")
    return ", ".join(parts)
