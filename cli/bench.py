"""`dflash-local bench`: what drafting gains on this machine."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_local import demo
from dflash_local.bench.peers.paper import PaperValue, paper_value
from dflash_local.bench.prompts.dataset import DATASETS, load_prompts
from dflash_local.bench.prompts.prompt import CATEGORIES, BenchPrompt, read_prompts, read_replay
from dflash_local.bench.replay import SHIPPED
from dflash_local.fit.options import SHAPES

from . import interrupt
from .answer import stdout_columns, write_report, write_stdout
from .loading import chosen_files
from .options import (
    DRAFT_SHAPE,
    FILES,
    LOADING,
    QUIET,
    READABLE,
    Option,
    SectionedCommand,
    values_of,
)
from .progress import writing_progress
from .request import INTERRUPTED
from .terminal import Speaker
from .values import name_list, number, whole, whole_list

if TYPE_CHECKING:
    from dflash_local.bench.benchmark import BenchOptions
    from dflash_local.bench.report.report import Report
    from dflash_local.draft.shape import DraftShape
    from dflash_local.engine.engine import Engine
    from dflash_local.fit.options import LoadOptions
    from dflash_local.fit.plan import Plan

_MAX_TOKENS, _MOST_TOKENS = 96, 1 << 20
_SHIPPED = "shipped"
"""What `--replay` without a file stands for."""
_OUTPUT = click.Path(dir_okay=False, writable=True)


class _Replay(click.Path):
    """A file, or the word for the shipped texts."""

    def convert(self, value: Any, *place: Any) -> Any:
        return value if value == _SHIPPED else super().convert(value, *place)


_NAMES = {"categories": "category", "llama_server": "against-llama-server"}
"""Names of options that differ from those of their values."""


def _temperatures(value: Any) -> tuple[float, ...]:
    """Reads `0,0.8`: numbers from 0 to 100, each kept once."""
    return tuple(dict.fromkeys(map(number(0, 100), str(value).split(","))))


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
        "models say; trees emit as many more as with the shipped pair. The text is invalid, the "
        "speed is real.",
    ),
)

PROMPTS = (
    Option(
        "--category",
        "categories",
        metavar="NAME",
        multiple=True,
        show_default="all",
        help=f"Built-in prompts to use: {', '.join(CATEGORIES)}; with --replay, texts of its file. "
        "May be repeated.",
    ),
    Option(
        "--prompts",
        type=READABLE,
        help="A file with prompts of your own, a JSON object on each line: prompt, or messages, or "
        "prefix and suffix; and a category.",
    ),
    Option(
        "--dataset",
        type=click.Choice(list(DATASETS)),
        help="Prompts of a published evaluation; the paper's values are shown beside yours.",
    ),
    Option(
        "--dataset-folder",
        type=click.Path(exists=True),
        show_default="from the Hugging Face hub",
        help="The folder of the dataset, or its file.",
    ),
    Option("--limit", type=whole(1), default=4, help="Prompts of each category."),
    Option(
        "--depths",
        type=whole_list(64, 1 << 20),
        metavar="N,...",
        show_default="1k,8k,32k; on a CPU 1k",
        help="Long prompts: their answers end after so many tokens of context.",
    ),
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
    Option("--thinking", is_flag=True, help="Let chat templates ask for reasoning."),
)

MEASURING = (
    Option(
        "-n",
        "--max-tokens",
        type=whole(2),
        show_default=f"{_MAX_TOKENS}; with --replay all of them",
        help="Tokens of each answer.",
    ),
    Option(
        "--temps",
        "temperatures",
        type=_temperatures,
        metavar="X,...",
        show_default="0,0.8; with --replay 0",
        help="Temperatures.",
    ),
    Option(
        "--widths",
        type=whole_list(2, 64),
        metavar="N,...",
        help="Fixed draft widths to measure beside the one that the model chooses.",
    ),
    Option(
        "--draft-shape",
        "draft_shapes",
        type=name_list(SHAPES),
        metavar="NAME,...",
        show_default="chain,tree; on a CPU chain",
        help="Shapes of drafts to measure: chain, tree, and auto, which uses what pays.",
    ),
    Option("--repeat", type=whole(1), default=1, help="Answers to each prompt."),
    Option(
        "--seed",
        type=whole(0, 2**32 - 1000),
        default=0,
        help="Seed of the random numbers.",
    ),
    Option(
        "--concurrency",
        type=whole_list(1, 64),
        metavar="N,...",
        help="Measure so many requests at once, too, such as 1,4,8.",
    ),
    Option(
        "--against-llama-server",
        "llama_server",
        type=READABLE,
        metavar="PATH",
        help="Give the same prompts to this llama-server, too, plain and with its DFlash.",
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
    Option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the tables."),
    Option("--markdown", type=_OUTPUT, help="Write a table to this file, too."),
    Option("--plot", type=_OUTPUT, help="Draw the results, as .png or .svg."),
    QUIET,
)

MACHINE = tuple(option for option in LOADING if option is not DRAFT_SHAPE)

SECTIONS = {
    "Model": (*FILES, *SHAPE),
    "Prompts": PROMPTS,
    "Measuring": MEASURING,
    "Output": OUTPUT,
    "Machine": MACHINE,
}


class BenchCommand(SectionedCommand):
    """Remembers its arguments, which are shown beside the numbers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)


@click.command(cls=BenchCommand, sections=SECTIONS)
@click.pass_context
def bench(ctx: click.Context, /, **values: Any) -> int:
    """Measure what drafting gains on this machine.

    Each prompt is decoded plainly and with drafts in turn, on the same loaded model, from empty
    caches and after a prefix hit. Tables on stdout show tokens/s, their ratio, how many tokens a
    round emits, and where the time goes. Without --target, the tiny shipped pair is measured.
    """
    _check(values)
    command = shlex.join(["dflash-local", "bench", *ctx.meta["arguments"]])
    say = Speaker(values["quiet"])
    from dflash_local.bench.benchmark import benchmark

    with _files(values, say) as (target, draft):
        options = _options(values, command, target, draft)
        report = benchmark(options, partial(_open, say=say), say)
    if values["dataset"] is not None:
        report.paper = _paper(values["dataset"], target, options.settings.temperatures)
    _write(report, values)
    if report.failure is not None:
        raise report.failure
    return INTERRUPTED if report.interrupted else 0


def _check(values: Mapping[str, Any]) -> None:
    """Refuse what has no meaning, or could not be written in the end, before any work."""
    if values["draft"] is not None and values["target"] is None:
        raise click.UsageError(
            f"--draft {values['draft']} is given without its target: add --target."
        )
    for one, other in (
        ("shape", "target"),
        ("prompts", "dataset"),
        ("prompts", "categories"),
        ("dataset", "categories"),
        ("shape", "prompts"),
        ("shape", "dataset"),
        ("replay", "prompts"),
        ("replay", "dataset"),
        ("replay", "depths"),
        ("replay", "llama_server"),
        *([] if values["replay"] else [("shape", "categories")]),
    ):
        if values[one] and values[other]:
            names = [f"--{_NAMES.get(name, name)}" for name in (one, other)]
            raise click.UsageError(f"{names[0]} and {names[1]} exclude each other: leave out one.")
    for name in () if values["replay"] else values["categories"]:
        if name not in CATEGORIES:
            raise click.UsageError(
                f"--category {name!r} is not one of the built-in prompts: {', '.join(CATEGORIES)}."
            )
    for name, owner in (
        ("shape_layers", "shape"),
        ("shape_folder", "shape"),
        ("dataset_folder", "dataset"),
    ):
        if values[name] is not None and values[owner] is None:
            raise click.UsageError(f"--{name.replace('_', '-')} belongs to --{owner}: add it.")
    if values["llama_server"] is not None and not os.access(values["llama_server"], os.X_OK):
        raise click.UsageError(f"{values['llama_server']} is not executable: name a llama-server.")
    if values["markdown"] is not None and not Path(values["markdown"]).absolute().parent.is_dir():
        raise click.UsageError(f"there is no folder for {values['markdown']}: make it first.")
    if values["plot"] is not None:
        from dflash_local.bench.report.plot import check_plot

        check_plot(Path(values["plot"]))


def _options(
    values: Mapping[str, Any], command: str, target: Path, draft: Path | None
) -> BenchOptions:
    from dflash_local.bench.benchmark import BenchOptions
    from dflash_local.bench.measure.settings import RunSettings, variants_from

    replay = values["replay"]
    shapes = values["draft_shapes"] or _usual_shapes(values)
    settings = RunSettings(
        temperatures=values["temperatures"] or ((0.0,) if replay else (0.0, 0.8)),
        variants=variants_from(shapes, values["widths"] or ()),
        max_tokens=values["max_tokens"] or (_MOST_TOKENS if replay else _MAX_TOKENS),
        repeat=values["repeat"],
        seed=values["seed"],
    )
    if values["synthetic_length"] is not None and draft is None:
        raise click.UsageError("--synthetic-length needs a drafter: add --draft.")
    server = values["llama_server"]
    return BenchOptions(
        target=target,
        draft=draft,
        settings=settings,
        command=command,
        prompts=_prompts(values),
        random=values["shape"] is not None,
        replay=f"the {_SHIPPED} edits" if replay == _SHIPPED else replay,
        categories=tuple(values["categories"]) or CATEGORIES,
        limit=values["limit"],
        depths=values["depths"],
        thinking=values["thinking"],
        concurrency=values["concurrency"] or (),
        synthetic_length=values["synthetic_length"],
        llama_server=Path(server) if server else None,
        server_drafts=values["server_drafts"],
        loading=values_of(MACHINE, values),
    )


def _usual_shapes(values: Mapping[str, Any]) -> tuple[DraftShape, ...]:
    """Trees are measured where they would be used."""
    from dflash_local.fit.options import LoadOptions
    from dflash_local.llama import runtime
    from dflash_local.pair import usual_shape

    options = LoadOptions(**values_of(MACHINE, values))
    is_chain = usual_shape(list(runtime.devices()), options) == "chain"
    return ("chain",) if is_chain else ("chain", "tree")


@contextmanager
def _files(values: Mapping[str, Any], say: Speaker) -> Iterator[tuple[Path, Path | None]]:
    """Target and drafter. Those of a shape are written first, to their folder or a temporary
    one."""
    if values["shape"] is None:
        if values["target"] is not None:
            from dflash_local.fit.options import LoadOptions

            yield chosen_files(values, say, LoadOptions(**values_of(MACHINE, values)))
            return
        say("no --target: measuring the shipped pair, a tiny model of Python code")
        yield demo.pair()
        return
    from dflash_local.bench.shapes.writer import write_pair

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
    """Those of a file or of a dataset; None for the built-in ones."""
    if values["replay"] is not None:
        file = SHIPPED if values["replay"] == _SHIPPED else values["replay"]
        return read_replay(file, categories=values["categories"], limit=values["limit"])
    if values["prompts"] is not None:
        return read_prompts(values["prompts"], limit=values["limit"])
    if values["dataset"] is None:
        return None
    folder = Path(values["dataset_folder"]) if values["dataset_folder"] else None
    return load_prompts(values["dataset"], folder, values["limit"])


def _paper(
    dataset: str, target: Path, temperatures: Sequence[float]
) -> dict[tuple[str, float], PaperValue]:
    """What the paper reports for this dataset and target, by dataset and temperature."""
    values = {(dataset, t): paper_value(dataset, target.name, t) for t in temperatures}
    return {key: value for key, value in values.items() if value is not None}


def _open(
    target: Path, draft: Path | None, options: LoadOptions, *, say: Speaker
) -> tuple[Engine, Plan]:
    from dflash_local.loading import open_engine
    from dflash_local.pair import open_pair

    with interrupt.ending():
        return open_engine(open_pair(target, draft), options, say=say)


def _write(report: Report, values: Mapping[str, Any]) -> None:
    from dflash_local.bench.report.markdown import markdown
    from dflash_local.bench.report.terminal import terminal
    from dflash_local.bench.report.verdict import verdict

    if values["as_json"]:
        write_stdout(json.dumps({"verdict": verdict(report), **report.as_dict()}) + "\n")
    else:
        write_report(terminal(report, stdout_columns()))
    if values["markdown"] is not None:
        Path(values["markdown"]).write_text(markdown(report), encoding="utf-8")
    if values["plot"] is not None:
        from dflash_local.bench.report.plot import plot

        plot(report, Path(values["plot"]))
