"""From findings to faults: one line first, and the remedy for each fault."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_local.doctor.machine import Machine
from dflash_local.doctor.trial import PairTrial

NONE_ACCEPTED = 1.2
"""Tokens per round below which drafts are wrong, not poor: one in five rounds kept a draft."""
FEW_ACCEPTED = 2.0
"""Below it a pair of which nothing is known does worse than any that was published (3 to 7)."""
_STRANGERS = "a drafter of another fine-tune"
_BETTER = 1.4
"""A thinking mode that gives so many times the tokens per round is the one that was trained."""
_F16 = 65504.0
"""The largest number in 16 bits, in which drafters keep their keys and values."""


@dataclass(frozen=True)
class PairNames:
    """Facts about the files: names alone, no folders. `made_for` is the target that the drafter's
    file names, `target_name` the name inside the target's file."""

    target: str
    drafter: str | None
    target_bytes: int
    drafter_bytes: int
    quantization: str | None
    target_name: str | None = None
    made_for: str | None = None
    is_dflash: bool = True
    """Whether the drafter was trained for its target, so that many of its drafts are accepted."""
    has_heads: bool = False
    """Whether it drafts with heads of the target's own file."""
    expected: float | None = None
    """Tokens per round that were measured or published for this pair, on other prompts."""


@dataclass(frozen=True)
class Alarm:
    """`name` is for programs, `text` has the remedy. Without `is_fault` it is a fact to know."""

    name: str
    text: str
    is_fault: bool = True


def alarms(
    machine: Machine,
    pair: PairNames | None,
    trial: PairTrial | None,
    kernel_faults: Sequence[str] = (),
) -> list[Alarm]:
    """All that is wrong, the worst first."""
    found = list(_of_trial(pair, trial)) if pair and trial else []
    if trial and trial.noise:
        found.append(Alarm("busy", trial.noise, is_fault=False))
    if machine.gpu_advice:
        found.append(Alarm("gpu_not_used", machine.gpu_advice))
    for fault in kernel_faults:
        text = f"{fault}; answers are right, but slower: please report it with `doctor --json`"
        found.append(Alarm("kernel_put_aside", text, is_fault=False))
    if machine.kernel_advice:
        found.append(Alarm("no_own_kernels", machine.kernel_advice, is_fault=False))
    return found


def verdict(found: list[Alarm], pair: PairNames, trial: PairTrial | None) -> str:
    for alarm in found:
        if alarm.is_fault:
            return alarm.text
    if trial is None:
        return f"{pair.target} works, without a drafter: --draft gives it one"
    figure = f"{trial.tokens_per_round:.2f} tokens per round in whole blocks"
    if trial.noise:
        return (
            f"the pair is in order, {figure}, but the machine is too busy with other work to tell "
            "whether drafting gains anything: ask again when it is idle"
        )
    if trial.drafting or not trial.gains:
        why = f" ({trial.drafting})" if trial.drafting else ""
        return f"the pair is in order, {figure}, but nothing is drafted on this machine{why}"
    gain = gain_text(trial)
    if min(trial.gains) > 1:
        return f"all is well: answers come {gain}; {figure}"
    if max(trial.gains) < 1:
        return (
            f"the pair is in order, {figure}, but drafting does not pay here: answers come {gain}"
        )
    return (
        f"the pair is in order, {figure}; whether drafting pays here differs between prompts: "
        f"answers come {gain}"
    )


def gain_text(trial: PairTrial) -> str:
    """The gain with its spread, and by which drafts."""
    by = f", {trial.gained_by}" if trial.gained_by else ""
    low, high = min(trial.gains), max(trial.gains)
    return (
        f"{trial.gain:.2f} times as fast as without drafts ({low:.2f} to {high:.2f} by prompt){by}"
    )


def _of_trial(pair: PairNames, trial: PairTrial) -> Iterator[Alarm]:
    rate = trial.tokens_per_round
    state = trial.largest_state
    if state is not None and not state <= _F16:
        size = "no number" if math.isnan(state) else f"{state:.3g}"
        yield Alarm(
            "overflow",
            f"hidden states of the target overflow 16 bits (the largest is {size}): take a target "
            "file in another quantisation, or a build of llama.cpp with BF16",
        )
    thinking = trial.thinking_tokens_per_round
    if thinking is not None and rate > _BETTER * thinking:
        yield Alarm(
            "thinking",
            f"this drafter was trained without thinking: {rate:.2f} tokens per round, and "
            f"{thinking:.2f} with it; ask without, as by --no-thinking",
            is_fault=False,
        )
    least = FEW_ACCEPTED if pair.is_dflash else NONE_ACCEPTED
    if pair.expected:
        least = max(NONE_ACCEPTED, min(least, pair.expected / 2))
    if rate >= least:
        if pair.expected and rate < pair.expected / 2:
            yield Alarm(
                "below_expected",
                f"fewer drafts are accepted than this pair should have: {rate:.2f} tokens per "
                f"round, and {pair.expected:.2f} were published; likely causes: another fine-tune "
                "of the target, or one below four bits",
            )
        return
    level = "next to no draft is" if rate < NONE_ACCEPTED else "few drafts are"
    text = f"{level} accepted: {rate:.2f} tokens per round, where published pairs have 3 to 7; "
    if trial.unknown_marks:
        marks = ", ".join(trial.unknown_marks)
        yield Alarm(
            "chat_template",
            f"{text}the chat template is not this model's: {marks} are no tokens of its "
            "vocabulary; take a target file with the template that its makers published",
        )
    elif thinking is not None and thinking > _BETTER * rate:
        yield Alarm(
            "thinking",
            f"{text}with thinking they are {thinking:.2f}: this drafter was trained with thinking, "
            "so leave it on",
        )
    elif pair.made_for and pair.target_name and _differ(pair.made_for, pair.target_name):
        yield Alarm(
            "other_target",
            f"{text}the drafter was made for {pair.made_for}, and this target is "
            f"{pair.target_name}: take the drafter of that model, or that model",
        )
    else:
        strangers = "heads that a fine-tune left behind" if pair.has_heads else _STRANGERS
        yield Alarm(
            "few_accepted",
            f"{text}likely causes: {strangers}, a target below four bits, or another chat template",
        )


def _differ(a: str, b: str) -> bool:
    """Whether two names are neither equal, but for signs, nor one the beginning of the other."""
    x, y = (re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower()) for name in (a, b))
    return not (x.startswith(y) or y.startswith(x))
