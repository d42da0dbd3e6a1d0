"""`python -m lab.bench`: all options of `dflash-local bench`, and those of maintainers."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dflash_local.bench.measure.settings import CACHE_STATES
from dflash_local.bench.prompts.prompt import BenchPrompt
from dflash_local.cli import bench as users
from dflash_local.cli.main import run
from dflash_local.cli.options import READABLE, Option
from dflash_local.cli.progress import writing_progress
from dflash_local.cli.terminal import Speaker
from dflash_local.cli.values import number, whole, whole_list
from dflash_local.pair import open_pair
from lab.bench.markdown import markdown
from lab.bench.plot import check_plot, plot
from lab.bench.report import LabReport
from lab.bench.run import LabBenchmark, LabOptions
from lab.bench.terminal import terminal
from lab.replay import SHIPPED
from lab.replay.answers import read_replay
from lab.shapes.writer import write_pair

NAME = "python -m lab.bench"
_MOST_TOKENS = 1 << 20
_SHIPPED = "shipped"
"""The value of `--replay` without a file."""
_OUTPUT = click.Path(dir_okay=False, writable=True)


class _Replay(click.Path):
    """A file, or the word for the shipped texts."""

    def convert(self, value: Any, *place: Any) -> Any:
        return value if value == _SHIPPED else super().convert(value, *place)


SHAPE = (
    Option(
        "--shape",
        metavar="NAME",
        help="Instead of --target: a model with random weights and the shape of this one, written "
        "first. qwen3-8b, qwen3-4b, qwen3-30b-a3b, qwen3.6-27b, llama-3.1-8b and others.",
    ),
    Option("--quant", default="Q4_K_M", metavar="TYPE", help="Quantisation of --shape."),
    Option("--shape-layers", type=whole(1, 1000), help="Another number of layers."),
    Option(
        "--shape-folder",
        type=click.Path(exists=True, file_okay=False),
        show_default="a temporary one",
        help="Keep the files of --shape in this folder, and use those that are already there.",
    ),
    Option(
        "--synthetic-length",
        type=number(1, 16),
        help="Accept drafts as if a round of whole chains emitted so many tokens, whatever the "
        "models say; trees emit as many more as with tiny-coder. The text is invalid, the "
        "speed is real.",
    ),
)

REPLAY = (
    Option(
        "--replay",
        type=_Replay(exists=True, dir_okay=False, readable=True),
        is_flag=False,
        flag_value=_SHIPPED,
        metavar="[FILE]",
        help="Let given answers come out: those of this file, prompts as for --prompts with an "
        "answer each; without FILE, edits of open code that are shipped. The target does all its "
        "work; drafts are accepted where they equal the given text. For any model, --shape and "
        "--synthetic-length, too.",
    ),
)

SERVER = (
    Option(
        "--against-llama-server llama_server",
        type=READABLE,
        metavar="PATH",
        help="Give the same prompts to this llama-server, too, plain and with its drafts.",
    ),
    Option(
        "--server-drafts",
        type=whole_list(1, 64),
        metavar="N,...",
        default="15",
        help="Drafts a round in llama-server.",
    ),
)

OUTPUT = (
    Option("--markdown", type=_OUTPUT, help="Write a table to this file, too."),
    Option("--plot", type=_OUTPUT, help="Draw the results, as .png or .svg."),
)

SECTIONS = {
    "Model": (*users.SECTIONS["Model"], *SHAPE),
    "Prompts": (*users.PROMPTS, *REPLAY),
    "Measuring": (*users.MEASURING, *SERVER),
    "Output": (*users.OUTPUT, *OUTPUT),
    "Machine": users.MACHINE,
}


@click.command(
    cls=users.BenchCommand,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.pass_context
def bench(ctx: click.Context, /, **values: Any) -> int:
    """Measure as `dflash-local bench` does, and more.

    It takes models of random weights, lets given answers come out, and gives the same prompts to
    llama-server. It also measures prefix hits, a pass of the target by its rows, and memory.
    """
    _check(values)
    say = Speaker(values["quiet"])
    with _files(values, say) as (target, draft):
        options = _options(ctx, values, target, draft)
        report = LabBenchmark(options, partial(users.open_files, say=say), say).run()
    assert isinstance(report, LabReport)
    try:
        return users.finished(report, values, terminal)
    finally:
        if values["markdown"] is not None:
            Path(values["markdown"]).write_text(markdown(report), encoding="utf-8")
        if values["plot"] is not None:
            plot(report, Path(values["plot"]))


def _check(values: Mapping[str, Any]) -> None:
    """Refuse options without meaning, and files that could not be written, before any work."""
    users.exclude(values, ("shape", "target"), ("shape", "draft"))
    users.check(values)
    users.exclude(
        values,
        ("shape", "prompts"),
        ("shape", "dataset"),
        ("replay", "prompts"),
        ("replay", "dataset"),
        ("replay", "depths"),
        ("replay", "llama_server"),
        *([] if values["replay"] else [("shape", "categories")]),
    )
    for name in ("shape_layers", "shape_folder"):
        if values[name] is not None and values["shape"] is None:
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to --shape: add it.")
    if not values["replay"]:
        users.check_categories(values["categories"])
    if values["llama_server"] is not None and not os.access(values["llama_server"], os.X_OK):
        raise click.UsageError(f"{values['llama_server']} is not executable: name a llama-server.")
    if values["markdown"] is not None and not Path(values["markdown"]).absolute().parent.is_dir():
        raise click.UsageError(f"there is no folder for {values['markdown']}: make it first.")
    if values["plot"] is not None:
        check_plot(Path(values["plot"]))


def _options(
    ctx: click.Context, values: dict[str, Any], target: Path, draft: Path | None
) -> LabOptions:
    if values["synthetic_length"] is not None and open_pair(target, draft).draft is None:
        raise click.UsageError("--synthetic-length needs a drafter: add --draft.")
    replay, server = values["replay"], values["llama_server"]
    usual = {"temperatures": (0.0,), "max_tokens": _MOST_TOKENS} if replay else {}
    for name, value in usual.items():
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            values[name] = value
    common = users.common(ctx, values, target, draft)
    common["settings"] = replace(common["settings"], caches=CACHE_STATES)
    return LabOptions(
        **common,
        prompts=_prompts(values),
        random=values["shape"] is not None,
        replay=f"the {_SHIPPED} edits" if replay == _SHIPPED else replay,
        synthetic_length=values["synthetic_length"],
        llama_server=Path(server) if server else None,
        server_drafts=values["server_drafts"],
    )


@contextmanager
def _files(values: Mapping[str, Any], say: Speaker) -> Iterator[tuple[Path, Path | None]]:
    """Target and drafter. Those of a shape are written first, to their folder or a temporary
    one."""
    if values["shape"] is None:
        yield users.chosen_pair(values, say)
        return
    with tempfile.TemporaryDirectory(prefix="dflash-local-") as temporary:
        folder = Path(values["shape_folder"] or temporary)
        with writing_progress(say) as progress:
            pair = write_pair(
                values["shape"],
                values["quant"],
                folder,
                n_layer=values["shape_layers"],
                progress=progress,
            )
        yield pair


def _prompts(values: Mapping[str, Any]) -> list[BenchPrompt] | None:
    if values["replay"] is None:
        return users.prompts_of(values)
    file = SHIPPED if values["replay"] == _SHIPPED else values["replay"]
    return read_replay(file, categories=values["categories"], limit=values["limit"])


if __name__ == "__main__":
    sys.exit(run(command=bench, name=NAME))
