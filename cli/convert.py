"""`dflash-local convert`: a published drafter as a GGUF file."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .answer import write_json, write_stdout
from .options import QUIET, Option, SectionedCommand
from .progress import writing_progress
from .report import byte_size
from .terminal import Speaker

if TYPE_CHECKING:
    from dflash_local.convert import ConvertResult

# as `dflash_local.convert.quantization` has them, which needs llama.cpp to load
OUTTYPES = (
    "f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s",
    "q4_1", "q4_0", "q3_k_m",
)  # fmt: skip

SECTIONS = {
    "Input": (
        Option(
            "--target TARGET",
            "What it drafts for: a GGUF file, a folder that holds one, a name of `list`, or a "
            "place on the hub that has GGUF files, of which only a header is fetched.",
            of="convert",
            show_default="the one that the drafter is for, if that is known",
        ),
        Option(
            "--revision REV",
            "Branch, tag or commit of a SOURCE on the hub.",
            show_default="the newest",
        ),
    ),
    "Output": (
        Option(
            "--outtype TYPE",
            f"Type of the weights: {', '.join(OUTTYPES)}.",
            type=click.Choice(OUTTYPES),
            default="q8_0",
        ),
        Option(
            "-o --output FILE",
            "The file to write.",
            of="convert",
            type=click.Path(),
            show_default="<drafter>-<outtype>.gguf here",
        ),
        Option("--force", "Replace FILE if it exists."),
        Option("--dry-run", "Fetch, plan and check, and write nothing."),
        Option("--json as_json", "Print one JSON object about the file."),
        QUIET,
    ),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("source")
def convert(source: str, target: str | None, as_json: bool, quiet: bool, **values: Any) -> None:
    """Write a published drafter as a GGUF file.

    SOURCE is a DFlash drafter: a hub id or a local folder. The tokenizer is the target's; of a
    target on the hub only the header of its file is fetched. The file is checked, and appears whole
    or not at all. Its path alone goes to stdout.
    """
    if quiet:
        # read once, when the hub's client is imported
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from dflash_local.pairs.conversion import convert_for

    say = Speaker(quiet)
    _check_source(source)
    with writing_progress(say) as progress:
        result = convert_for(source, target, say=say, progress=progress, **values)
    dry_run = values["dry_run"]
    for line in result.checks:
        say(f"checked: {line}")
    say(_summary(result, dry_run))
    if not dry_run:  # advice on the use of the file, with the target as it was given
        given, draft = shlex.quote(target or result.target), shlex.quote(str(result.path))
        say(f"next: dflash-local chat --target {given} --draft {draft}")
    if as_json:
        write_json({**result.as_dict(), "dry_run": dry_run})
    elif not dry_run:
        write_stdout(f"{result.path}\n")


def _check_source(source: str) -> None:
    """Refuse the name of a pair, which is converted by itself. Raises click.UsageError."""
    from dflash_local.pairs.registry import named

    found = None if Path(source).exists() else named(source)
    if found is not None:
        raise click.UsageError(
            f"{source} names a pair: `dflash-local pull {source}` fetches and converts its "
            f"drafter; to write a file of it here, give {found[0].drafter}."
        )


def _summary(result: ConvertResult, dry_run: bool) -> str:
    taps = ", ".join(str(layer - 1) for layer in result.target_layers)
    did = f"would write {result.path}" if dry_run else "written"
    return (
        f"{did}: {byte_size(result.n_bytes)} in {result.n_tensors} tensors, {result.outtype}; "
        f"block of {result.block_size}, taps after layers {taps}"
    )
