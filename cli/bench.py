"""`dflash-local bench`: what drafting gains on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dflash_local.bench.paper import paper_value
from dflash_local.bench.prompts.dataset import DATASETS, load_prompts
from dflash_local.bench.prompts.prompt import CATEGORIES, USUAL, BenchPrompt, read_prompts
from dflash_local.fit.options import SHAPES, LoadOptions
from dflash_local.printable import silent

from . import interrupt
from . import options as shared
from .answer import stdout_columns, write_json, write_report
from .loading import check_files, chosen_files
from .options import READABLE, Option, SectionedCommand
from .request import INTERRUPTED
from .terminal import Speaker
from .values import name_list, number, whole, whole_list

if TYPE_CHECKING:
    from dflash_local.bench.report.report import Report
    from dflash_local.engine.engine import Engine
    from dflash_local.fit.plan import Plan

AnyReport = TypeVar("AnyReport", bound="Report")

_NAMES = {"categories": "category", "llama_server": "against-llama-server"}
"""Names of options that differ from those of their values."""


def _temperatures(value: Any) -> tuple[float, ...]:
    """Reads `0,0.8`: numbers from 0 to 100, each kept once."""
    return tuple(dict.fromkeys(map(number(0, 100), str(value).split(","))))


PROMPTS = (
    Option(
        "--category categories NAME",
        f"Built-in prompts to use: {', '.join(CATEGORIES)}. May be repeated.",
        multiple=True,
        show_default=" and ".join(USUAL),
    ),
    Option(
        "--prompts",
        "A file with prompts of your own, a JSON object on each line: prompt, or messages, or "
        "prefix and suffix; and a category.",
        type=READABLE,
    ),
    Option(
        "--dataset",
        "Prompts of a published evaluation, from the Hugging Face hub; the paper's values are "
        "shown beside yours.",
        type=click.Choice(list(DATASETS)),
    ),
    Option("--limit", "Prompts of each category.", type=whole(1), default=4),
    Option(
        "--depths N,...",
        "Long prompts: their answers end after so many tokens of context.",
        type=whole_list(64, 1 << 20),
        show_default="1k,8k,32k; on a CPU 1k",
    ),
    Option("--thinking", "Let chat templates ask for reasoning."),
)

MEASURING = (
    Option("-n --max-tokens", "Tokens of each answer.", type=whole(2), default=96),
    Option("--temps temperatures X,...", "Temperatures.", type=_temperatures, default="0,0.8"),
    Option(
        "--widths N,...",
        "Fixed draft widths to measure beside the one that the model chooses.",
        type=whole_list(2, 64),
    ),
    Option(
        "--draft-shape draft_shapes NAME,...",
        "Shapes of drafts to measure: chain, tree, and auto, which uses what pays.",
        type=name_list(SHAPES),
        show_default="what the model would use",
    ),
    Option("--repeat", "Answers to each prompt.", type=whole(1), default=1),
    Option("--seed", "Seed of the random numbers.", type=whole(0, 2**32 - 1000), default=0),
    Option(
        "--concurrency N,...",
        "Measure so many requests at once, too, such as 1,4,8.",
        type=whole_list(1, 64),
    ),
)

OUTPUT = (
    Option("--json as_json", "Print one JSON object instead of the table."),
    shared.QUIET,
)

MACHINE = tuple(option for option in shared.LOADING if option is not shared.DRAFT_SHAPE)

SECTIONS = {
    "Model": shared.FILES,
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

    Each prompt is decoded plainly and with drafts in turn, on the same loaded model. A table on
    stdout shows tokens/s, their ratio, and how many tokens a round emits; the line above says
    whether drafting pays. Without --target, smollm2-135m is measured.
    """
    check(values)
    check_categories(values["categories"])
    say = Speaker(values["quiet"])
    from dflash_local.bench.benchmark import Benchmark, BenchOptions
    from dflash_local.bench.report.terminal import terminal

    target, draft = chosen_pair(values, say)
    options = BenchOptions(prompts=prompts_of(values), **common(ctx, values, target, draft))
    report = Benchmark(options, partial(open_files, say=say), say).run()
    return finished(report, values, terminal)


def check(values: Mapping[str, Any]) -> None:
    """Refuse what has no meaning, before any work."""
    check_files(values)
    exclude(values, ("prompts", "dataset"), ("prompts", "categories"), ("dataset", "categories"))


def exclude(values: Mapping[str, Any], *pairs: tuple[str, str]) -> None:
    for pair in pairs:
        if all(values[name] for name in pair):
            one, other = (f"--{_NAMES.get(name, name)}" for name in pair)
            raise click.UsageError(f"{one} and {other} exclude each other: leave out one.")


def check_categories(categories: Sequence[str]) -> None:
    for name in categories:
        if name not in CATEGORIES:
            raise click.UsageError(
                f"--category {name!r} is not one of the built-in prompts: {', '.join(CATEGORIES)}."
            )


def common(
    ctx: click.Context, values: Mapping[str, Any], target: Path, draft: Path | None
) -> dict[str, Any]:
    """The fields of `BenchOptions` that its values give, but for the prompts."""
    from dflash_local.bench.measure.settings import RunSettings, variants_from
    from dflash_local.llama import runtime
    from dflash_local.pair import usual_shape

    shapes = values["draft_shapes"]
    if not shapes:
        options = LoadOptions(**shared.values_of(MACHINE, values))
        shapes = (usual_shape(list(runtime.devices()), options),)
    return {
        "target": target,
        "draft": draft,
        "settings": RunSettings(
            temperatures=values["temperatures"],
            variants=variants_from(shapes, values["widths"] or ()),
            max_tokens=values["max_tokens"],
            repeat=values["repeat"],
            seed=values["seed"],
        ),
        "command": shlex.join([*ctx.command_path.split(), *ctx.meta["arguments"]]),
        "categories": tuple(values["categories"]) or USUAL,
        "limit": values["limit"],
        "depths": values["depths"],
        "thinking": values["thinking"],
        "concurrency": values["concurrency"] or (),
        "loading": shared.values_of(MACHINE, values),
    }


def chosen_pair(values: Mapping[str, Any], say: Speaker) -> tuple[Path, Path | None]:
    """The files of a target and its drafter: none where the target's own heads are faster."""
    from dflash_local.drafter_choice import choose
    from dflash_local.loading import open_engine

    options = LoadOptions(**shared.values_of(MACHINE, values))
    with interrupt.ending():
        trial = partial(open_engine, say=silent)
        found = chosen_files(values, say, options)
        widest = max(values["widths"] or (), default=None)
        files, _ = choose(found, replace(options, draft_width=widest), say, trial)
    return files.target, files.draft


def prompts_of(values: Mapping[str, Any]) -> list[BenchPrompt] | None:
    """Those of a file or of a dataset; None for the built-in ones."""
    if values["prompts"] is not None:
        return read_prompts(values["prompts"], limit=values["limit"])
    if values["dataset"] is None:
        return None
    return load_prompts(values["dataset"], values["limit"])


def open_files(
    target: Path, draft: Path | None, options: LoadOptions, *, say: Speaker
) -> tuple[Engine, Plan]:
    from dflash_local.loading import open_engine
    from dflash_local.pair import open_pair

    with interrupt.ending():
        return open_engine(open_pair(target, draft), options, say=say)


def finished(
    report: AnyReport, values: Mapping[str, Any], shown: Callable[[AnyReport, int | None], str]
) -> int:
    """Print it, `shown` makes the text; the exit code. Raises what has ended the run."""
    from dflash_local.bench.report.verdict import verdict

    for temperature in report.settings.temperatures if values["dataset"] else ():
        value = paper_value(values["dataset"], report.environment.target, temperature)
        if value is not None:
            report.paper[values["dataset"], temperature] = value
    if values["as_json"]:
        write_json({"verdict": verdict(report), **report.as_dict()})
    else:
        write_report(shown(report, stdout_columns()))
    if report.failure is not None:
        raise report.failure
    return INTERRUPTED if report.interrupted else 0
