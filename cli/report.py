"""Reports for the user: about an answer, after it, as JSON and for `/stats`; sizes in words."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import dflash_local
from dflash_local.stats import Stats

_BAR = 40
_HARDLY = 1.2
"""Tokens per round. Below it the user is told why an answer was hardly drafted."""
_AGAINST_REPEATS = "a temperature of 0.8 or a repeat penalty of 1.1 helps most models"
_BESIDE_BAR = 16
"""Columns of the histogram that are not for its bars."""


def summary(result: dflash_local.Result, max_tokens: int) -> str:
    """One line: tokens, speed, tokens per round, time to first token, and what cut it short."""
    stats = result.stats
    rate = f"{stats.tokens_per_round:.2f} tokens per round" if stats.drafted else "plain decoding"
    if result.repeated and stats.drafted:
        rate = "drafting is easy in a text that repeats itself"
    parts = [
        f"{len(result.tokens)} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        rate,
        f"first token after {stats.ttft_s:.2f} s",
    ]
    if result.finish_reason == "cancelled":
        parts.append("stopped")
    if result.finish_reason == "length":
        is_limit = len(result.tokens) >= max_tokens
        by = f"at {max_tokens} tokens (--max-tokens)" if is_limit else "by the end of the context"
        parts.append(f"cut short {by}")
    line = ", ".join(parts)
    if result.repeated:
        return f"{line}; the text repeats itself: {_AGAINST_REPEATS}"
    hardly = stats.drafted and stats.tokens_per_round < _HARDLY
    is_off = stats.drafting is not None and stats.drafting.startswith("drafting is off")
    return f"{line}; {stats.drafting}" if hardly and is_off else line


def table(rows: Sequence[Sequence[Any]], heads: Sequence[str] = ()) -> str:
    """Rows in columns, without a line end. tabulate takes as long to import as all commands."""
    from tabulate import tabulate

    return tabulate(rows, heads, tablefmt="plain", disable_numparse=True)


def drafts_text(stats: Stats) -> str:
    """The drafted and accepted tokens on average, in the rounds that drafted."""
    from dflash_local.bench.measure.acceptance import Acceptance

    found = Acceptance.of([stats])
    if found.mean_length is None:
        return "no drafts were checked"
    text = f"{found.mean_length:.2f} tokens per round of {found.nodes:.1f} drafts"
    if not stats.tree_rounds:
        return text
    return (
        f"{text}, {found.depth:.1f} deep, in {found.branches:.1f} branches; "
        f"{100 * (found.side_share or 0):.0f} % of the rounds kept another branch than the "
        "drafter's first"
    )


def json_object(result: dflash_local.Result) -> dict[str, Any]:
    """The object that `--json` prints of a result."""
    of_chat = {"content": result.content, "reasoning": result.reasoning}
    return {
        "text": result.text,
        **(of_chat if result.content is not None else {}),
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": result.stats.as_dict(),
    }


def stats_page(model: dflash_local.Model, last: dflash_local.Result | None) -> list[str]:
    """The lines of `/stats`: the last answer, its rounds, the load plan, exactness."""
    lines = []
    if last is not None:
        lines += ["last answer", *_indented(_stats_lines(last))]
        if last.stats.accepted_lengths:
            lines += ["rounds by their tokens", *_indented(_histogram(last))]
    if model.plan is not None:
        lines += ["plan", *_indented(model.plan.lines())]
    if model.drafter is not None:
        lines += ["exactness", *_indented(model.exactness().lines())]
    return lines


def _stats_lines(result: dflash_local.Result) -> list[str]:
    stats = result.stats
    lines = [
        f"prompt   {stats.prompt_tokens} tokens, {stats.cached_tokens} of them from the cache, "
        f"{stats.prompt_s:.2f} s",
        f"answer   {len(result.tokens)} tokens, {stats.decode_s:.2f} s, "
        f"{stats.tokens_per_second:.1f} tokens/s, first token after {stats.ttft_s:.2f} s",
    ]
    if stats.drafted:
        lines.append(
            f"drafts   {stats.accepted} accepted of {stats.drafted} in {stats.rounds} rounds, "
            f"{stats.tokens_per_round:.2f} tokens per round"
        )
    if stats.copied:
        lines.append(
            f"copies   of these, {stats.copied} were copied from the text, and "
            f"{stats.copied_accepted} of the copies accepted"
        )
    if stats.tree_rounds:
        lines.append(f"trees    {drafts_text(stats)}")
    if stats.drafting:
        choice = stats.drafting
        if stats.copied_accepted:
            choice = choice.replace("drafting is off", "the drafter is off", 1)
        lines.append(f"choice   {choice}")
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in stats.shares.items())
    lines.append(f"time     {shares}")
    return lines


def _histogram(result: dflash_local.Result) -> list[str]:
    lengths = result.stats.accepted_lengths
    most = max(lengths.values())
    wide = max(1, min(_BAR, shutil.get_terminal_size().columns - _BESIDE_BAR))
    bars = {length: "#" * max(1, round(wide * n / most)) for length, n in lengths.items() if n}
    return [f"{length:3d} {bars[length]:{wide}s} {lengths[length]}" for length in sorted(bars)]


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def byte_size(n_bytes: int) -> str:
    """A number of bytes in words, such as "816.0 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.1f} {unit}"
    return f"{n_bytes} bytes"
