"""The lines above and below the tables: the measurements' places, and notes."""

from collections.abc import Iterator

from dflash_local.bench.report import cell
from dflash_local.bench.report.report import Environment, Report


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


def tail(report: Report) -> Iterator[str]:
    if report.n_compared:
        yield _sameness(report)
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


def _reasons(report: Report) -> Iterator[str]:
    """The controller's reasons for its choices: each text once, with its categories."""
    said: dict[str, list[str]] = {}
    for row in report.main_rows:
        if row.temperature == report.temperatures[0]:
            # Copies may have gained all the same.
            choice = (row.drafting or "").replace("drafting is off", "the drafter is off", 1)
            texts = [f"{row.variant}, at the end of the last answer: {choice}"] if choice else []
            for text in [*texts, *row.warnings]:
                said.setdefault(text, []).append(cell.name(row.category))
    for text, categories in said.items():
        yield f"{text} ({', '.join(categories)})"
