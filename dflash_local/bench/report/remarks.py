"""The lines above and below the tables: what was measured where, and what is to be noted."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_local.bench.measure.environment import Environment
from dflash_local.bench.report import cell
from dflash_local.bench.report.report import Report, TreeGain

_SYNTHETIC = (
    "text: invalid. Drafts were accepted as those of another pair had been, {:g} tokens per round "
    "of whole chains; speed is real, acceptance is not"
)


_REPLAY = (
    "text: given by {}. The target did all its work, and drafts that equal the text were accepted; "
    "speed is real, and acceptance is that of {}"
)


def models(environment: Environment) -> str:
    drafter = f" with {environment.drafter}" if environment.drafter else ""
    return environment.target + drafter


def place(environment: Environment) -> str:
    return (
        f"{', '.join(environment.devices)}; {threads(environment)}; context {environment.n_ctx}, "
        f"{environment.kv_type} KV cache; dflash-local {environment.version}, "
        f"{environment.llama_cpp}"
    )


def threads(environment: Environment) -> str:
    return f"{environment.n_threads} thread{'s' if environment.n_threads > 1 else ''}"


def validity(report: Report) -> list[str]:
    """A warning, where acceptance is synthetic or the text is given."""
    length = report.synthetic_length
    if report.replay is not None:
        drafts = "the model's own drafts"
        if length is not None:
            drafts = f"another pair's drafts, {length:g} tokens per round of whole chains"
        return [_REPLAY.format(report.replay, drafts)]
    return [] if length is None else [_SYNTHETIC.format(length)]


def tail(report: Report) -> Iterator[str]:
    if report.n_compared:
        yield _sameness(report)
    for gain in report.tree_gains:
        yield _tree_gain(gain)
    yield from _reasons(report)
    if any(row.forced for row in report.main_rows):
        yield (
            "* of a few answers that drafted whole blocks: those with the width that was chosen "
            "had too few rounds with drafts to count"
        )
    if report.concurrency:
        yield "several at once: tokens/s of all together, prompts included; else without prompts"
    for source in dict.fromkeys(value.source for value in report.paper.values()):
        yield f"paper: {source}; its speed-up is that of another program and machine"
    for note in report.notes:
        yield f"note: {note}"


def _sameness(report: Report) -> str:
    differing = report.differences
    if not differing:
        return f"greedy answers with drafts: all {report.n_compared} equal plain decoding's"
    beyond = [d for d in differing if not d.lead.is_within_rounding]
    text = (
        f"greedy answers with drafts: {len(differing)} of {report.n_compared} differ from plain "
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


def _tree_gain(gain: TreeGain) -> str:
    parts = []
    if gain.accepted_length is not None:
        parts.append(f"{gain.accepted_length:.2f} times the tokens per round")
    if gain.tokens_per_second is not None:
        parts.append(f"{gain.tokens_per_second:.2f} times the tokens/s")
    width = "of the width chosen" if gain.width == "auto" else f"of {gain.width} rows"
    return f"trees over chains {width}, temperature {gain.temperature:g}: {', '.join(parts)}"


def _reasons(report: Report) -> Iterator[str]:
    """What the controller says about its choices: each text once, with its categories."""
    said: dict[str, list[str]] = {}
    for row in report.main_rows:
        if row.temperature == report.temperatures[0]:
            said_last = f"{row.variant}, at the end of the last answer: {row.drafting}"
            texts = [said_last] if row.drafting else []
            for text in [*texts, *row.warnings]:
                said.setdefault(text, []).append(cell.name(row.category))
    for text, categories in said.items():
        yield f"{text} ({', '.join(categories)})"
