"""`dflash-local inspect`: what a GGUF file is, and whether a drafter fits a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .answer import write_json, write_report
from .options import JSON, READABLE, Option, SectionedCommand
from .report import byte_size, table
from .settings import FROM_ELSEWHERE
from .values import refused

if TYPE_CHECKING:
    from dflash_local.fit.inspection import (
        AssistantReport,
        DrafterReport,
        ProjectorReport,
        Report,
        TargetReport,
    )
    from dflash_local.gguf.drafter_spec import DrafterSpec

_FAMILIES = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}
_WAYS_BACK = {
    "cells": "yes: rejected tokens can be taken back",
    "snapshots": "yes: recurrent layers, by snapshots of their state; drafts are chains",
    "replay": "yes: recurrent layers, by replay of what stays; drafts are chains",
    None: "no: recurrent layers, whose state cannot be taken back",
}
_WIDE = 72
"""Characters of a value that comes from the file."""


def held_model(value: Any) -> str:
    """Reads the path of a file, or the name of a target whose files are on this disk."""
    from dflash_local.pairs.find import held_target

    if Path(value).exists() or str(value).endswith(".gguf"):
        return str(READABLE.convert(value, None, None))
    with refused():
        return str(held_target(str(value)))


SECTIONS = {
    "Comparison": (
        Option(
            "--target TARGET",
            "A target, as FILE is given: say whether the drafter FILE fits it.",
            of="inspect",
            type=held_model,
        ),
    ),
    "Output": (JSON,),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("file", type=held_model)
@click.pass_context
def inspect(ctx: click.Context, /, file: str, target: str | None, as_json: bool) -> None:
    """Say what the GGUF FILE is: a drafter, a target, or a projector.

    FILE is a path, or the name of a target that `dflash-local list --here` shows.

    For a drafter it shows the family and what runs it, the block, and which layers of the target it
    taps; for a target, whether llama.cpp lets a drafter work with it; for both, the types of the
    weights, the tokenizer and where the file comes from. Only headers are read. An ordinary small
    model can be a drafter, too: --target says whether it fits.

    With --target the exit code is 0 when the two fit and 2 when they do not.
    """
    from dflash_local.errors import PairError
    from dflash_local.fit.inspection import inspect_drafter, inspect_file
    from dflash_local.fit.pairing import check_pair
    from dflash_local.gguf.file import GgufFile

    opened = GgufFile.open(file)
    if ctx.get_parameter_source("target") in FROM_ELSEWHERE and opened.architecture != "dflash":
        target = None  # it is for the drafters that are inspected, not for targets
    if target is None:
        _print(inspect_file(opened), None, as_json)
        return
    other, fault = GgufFile.open(target), None
    try:
        check_pair(other, opened)
    except PairError as error:
        fault = error
    is_dflash = opened.architecture == "dflash"
    report = inspect_drafter(opened, target=other) if is_dflash else inspect_file(opened)
    fit = {"target": target, "fits": not fault, "error": fault and str(fault)}
    _print(report, fit, as_json)
    if fault:
        raise fault


def _print(report: Report, fit: Mapping[str, Any] | None, as_json: bool) -> None:
    if as_json:
        told = report.as_dict() if fit is None else {**report.as_dict(), "fit": fit}
        write_json(told)
        return
    lines = _report_lines(report)
    if fit is not None:
        verdict = "they fit" if fit["fits"] else "they do not fit"
        lines.append(f"with the target {Path(fit['target']).name}: {verdict}")
    write_report("\n".join(lines) + "\n")


def _report_lines(report: Report) -> list[str]:
    from dflash_local.fit.inspection import AssistantReport, DrafterReport, TargetReport

    facts = report.file
    kinds: dict[type, tuple[str, Callable[[Any], Iterator[tuple[str, str]]]]] = {
        TargetReport: ("a target", _target_rows),
        DrafterReport: ("a drafter", _drafter_rows),
        AssistantReport: ("a drafter", _assistant_rows),
    }
    what, rows_of = kinds.get(type(report), ("a projector", _projector_rows))
    rows = [*rows_of(report)]
    if facts.tokenizer or not what.endswith("projector"):
        rows.append(("tokenizer", facts.tokenizer or "none in this file"))
    rows.append(("quantization", facts.quantization or "not stated"))
    types = (f"{name} {byte_size(count)}" for name, count in facts.weights.items())
    rows.append(("weights", ", ".join(types)))
    shards = f" in {facts.n_shards} files" if facts.n_shards > 1 else ""
    return [
        f"{facts.path.name}: {what}, {byte_size(facts.n_bytes)}{shards}",
        *_table(rows),
        *(["  provenance"] if facts.provenance else []),
        *_table([(key, _text(value)) for key, value in facts.provenance.items()], indent=4),
    ]


def _assistant_rows(report: AssistantReport) -> Iterator[tuple[str, str]]:
    yield "family", "an assistant: heads of Gemma 4 that predict further tokens"
    yield "runs on", "llama.cpp's context for heads, step by step"
    yield "block", f"the anchor and up to {report.n_draft} drafts"
    yield (
        "reads",
        f"the target's hidden state, of size {report.n_embd_target}, and the cells of its last two "
        "layers; it has no cache of its own",
    )
    yield "layers", f"{report.n_layer}, hidden size {report.n_embd}"
    yield "vocabulary", f"{report.n_vocab} tokens"


def _projector_rows(report: ProjectorReport) -> Iterator[tuple[str, str]]:
    yield "kind", report.kind
    yield "reads", ", ".join(report.reads) or "nothing that is known here"
    yield "targets", f"of hidden size {report.n_embd}" if report.n_embd else "not stated"


def _target_rows(report: TargetReport) -> Iterator[tuple[str, str]]:
    yield "architecture", report.architecture
    yield "layers", f"{report.n_layer}, hidden size {report.n_embd}"
    yield "vocabulary", f"{report.n_vocab} tokens"
    yield "context", f"{report.context_length} tokens"
    yield (
        "taps",
        "yes: llama.cpp hands out the hidden states of its layers"
        if report.offers_taps
        else "no: llama.cpp hands out no hidden states of this architecture",
    )
    if report.n_heads:
        layers = f"{report.n_heads} layer{'s' if report.n_heads > 1 else ''}"
        use = (
            "they draft where no drafter is faster" if report.drafts_with_heads else "not used here"
        )
        yield "heads", f"{layers} to predict further tokens: {use}"
    yield "roll back", _WAYS_BACK[report.way_back]
    yield "drafting", _drafting_text(report)


def _drafting_text(report: TargetReport) -> str:
    heads = "with its heads, " if report.drafts_with_heads else ""
    if report.takes_drafters:
        return f"{heads}with a drafter, or plain"
    if report.rolls_back:
        return f"{heads}with a small model of the same vocabulary as the drafter, or plain"
    return "plain decoding only"


def _drafter_rows(report: DrafterReport) -> Iterator[tuple[str, str]]:
    spec = report.spec
    yield "family", _FAMILIES.get(spec.family, spec.family)
    alone = "" if report.llama_cpp_loads else "; llama.cpp loads no biases of the attention"
    yield "runs on", f"the fused draft graph, which knows all of its tensors{alone}"
    anchor = "the anchor and its" if spec.n_draft < spec.block_size else "drafts from it on,"
    yield "block", f"{spec.block_size} positions: {anchor} {spec.n_draft} drafts"
    yield (
        "taps",
        f"after {_layers(report.taps_after)} of the target (the inputs of "
        f"{_layers(spec.target_layers)})",
    )
    yield "layers", f"{spec.n_layer}, hidden size {spec.n_embd}, feed-forward {spec.n_ff}"
    yield (
        "attention",
        f"{spec.n_head} heads of {spec.head_dim}, {spec.n_head_kv} for keys and values, "
        + ("causal" if spec.causal else "both ways in the block"),
    )
    yield "window", _window_text(report)
    yield "RoPE", _rope_text(spec)
    yield "context", f"{spec.context_length} tokens"
    reduced = f", {spec.n_vocab_draft} of which are drafted"
    yield (
        "vocabulary",
        f"{spec.n_vocab} tokens{reduced if spec.n_vocab_draft < spec.n_vocab else ''}",
    )
    named = "" if report.mask_token is None else f" {report.mask_token!r}"
    yield "mask token", f"{spec.mask_token_id}{named}"


def _window_text(report: DrafterReport) -> str:
    spec = report.spec
    if not spec.sliding_window or not report.sliding_layers:
        return "none"
    every = len(report.sliding_layers) == spec.n_layer
    where = "every layer" if every else _layers(report.sliding_layers)
    return f"{spec.sliding_window} tokens in {where}"


def _rope_text(spec: DrafterSpec) -> str:
    rope = spec.rope
    parts = [f"base {rope.freq_base:g}"]
    if rope.n_dims < spec.head_dim:
        parts.append(f"{rope.n_dims} of {spec.head_dim} values of a head")
    if any(rope.sections):
        parts.append(f"M-RoPE sections {', '.join(map(str, rope.sections))}")
    if rope.scaling != "none":
        since = f" from {rope.original_context} tokens" if rope.scaling == "yarn" else ""
        parts.append(f"{rope.scaling} scaling by {rope.factor:g}{since}")
    return ", ".join(parts)


def _layers(layers: tuple[int, ...]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _table(rows: Sequence[Sequence[str]], indent: int = 2) -> list[str]:
    return [f"{'':{indent}}{line}" for line in table(rows).splitlines()]


def _text(value: Any) -> str:
    """A value from the file, on one line and not too long."""
    joined = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(joined.split())
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
