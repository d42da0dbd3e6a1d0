"""`dflash-local tune`: fit a drafter to the user's own model and text."""

from __future__ import annotations

import importlib
import shlex
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_local.cli import interrupt
from dflash_local.cli.answer import stdout_columns, write_json, write_report
from dflash_local.cli.options import LOADING, QUIET, TARGET_HELP, Option, SectionedCommand
from dflash_local.cli.ps import URL, check_url, fetched
from dflash_local.cli.request import INTERRUPTED
from dflash_local.cli.terminal import Speaker
from dflash_local.cli.values import WholeText, number, whole
from dflash_local.errors import InputError

if TYPE_CHECKING:
    from dflash_local_tune.card import Card
    from dflash_local_tune.fitting import Progress

_MACHINE = ("n_gpu_layers", "n_threads", "lora", "control_vectors")
_AS_GIVEN = ("minutes", "steps", "n_ctx", "max_tokens", "n_gpu_layers", "n_threads")
_INSTALL = "pip install 'dflash-local[tune]'"


def answer_tokens(command: str) -> Option:
    """The option of a training's command for the length of what it learns from."""
    return Option(
        "-n --max-tokens",
        of=command,
        type=whole(16),
        default=256,
        help="Tokens of each answer of the target.",
    )


SECTIONS = {
    "Model": (
        Option("--target", type=WholeText(), metavar="MODEL", help=TARGET_HELP),
        Option(
            "--draft",
            of="tune",
            type=WholeText(),
            metavar="DRAFTER",
            show_default="the target's own",
            help="The DFlash drafter to begin with: a GGUF file, a folder, or a hub repository.",
        ),
    ),
    "Texts": (
        Option(
            "--data",
            type=click.Path(exists=True, path_type=Path),
            show_default="general texts: questions and Python's standard library",
            help="What people use the model for: a folder of code or other texts, or a file with a "
            "JSON object on each line, prompt or messages or prefix and suffix, such as `serve "
            "--record` writes.",
        ),
        Option(
            "--ctx n_ctx",
            of="tune",
            type=whole(256),
            default=2048,
            help="Tokens of a prompt and its answer together; longer prompts are left out.",
        ),
    ),
    "Training": (
        Option(
            "--minutes", type=number(0, 1e6, above=True), default=60, help="Train at most so long."
        ),
        Option(
            "--steps",
            type=whole(1, 10**6),
            default=10000,
            help="Train at most so many steps. It ends earlier where held-out answers gain nothing "
            "more.",
        ),
        answer_tokens("tune"),
    ),
    "Machine": (
        Option(
            "--yield-to",
            metavar="URL",
            default=URL,
            help="Pause between steps while the server there, if one runs, answers requests.",
        ),
        *(each for each in LOADING if each.name in _MACHINE),
    ),
    "Output": (
        Option(
            "-o --output",
            of="tune",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            show_default="<drafter>-tuned, beside it or in this program's data",
            help="A new folder for the drafter: GGUF, a card, and safetensors if you gave them.",
        ),
        Option(
            "--undo",
            is_flag=True,
            help="Go back to the drafter that the target had before. The tuned one stays on disk.",
        ),
        Option("--json as_json", is_flag=True, help="Print one JSON object about the result."),
        QUIET,
    ),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("name", required=False)
@click.pass_context
def tune(ctx: click.Context, /, name: str | None, **values: Any) -> int:
    """Fit the drafter of a model to your own texts.

    It is the drafter of NAME, or of --target and --draft. The target answers prompts made of your
    texts, and the drafter learns to draft these answers. Without texts of your own, general ones
    fit it to a quantised or finetuned target. The old and the new drafter are measured
    on texts that were held out. Where the new one wins, it becomes the target's default on this
    machine. After Ctrl-C the same command goes on. What the model writes stays the same; only its
    speed changes.
    """
    if name is not None:
        given = click.core.ParameterSource.COMMANDLINE
        here = {each for each in ("target", "draft") if ctx.get_parameter_source(each) is given}
        if "target" in here:
            raise click.UsageError("NAME and --target name the model twice: leave out one of them.")
        values["target"] = name
        if "draft" not in here:  # a setting is for the target of the settings
            values["draft"] = None
    if values["target"] is None:
        raise click.UsageError("name a model of `dflash-local list`, or give --target and --draft.")
    say = Speaker(values["quiet"])
    if values["undo"]:
        _undo(values["target"], say)
        return 0
    check_url("--yield-to", values["yield_to"])
    return _tune(values, say)


def _undo(target: str, say: Speaker) -> None:
    from dflash_local.pairs import tuned
    from dflash_local.pairs.address import read_address
    from dflash_local.pairs.find import drafter_name, held_target

    last = tuned.undo(held_target(target), drafter_name(read_address(target)))
    say(f"no longer used: {last}")


def _tune(values: dict[str, Any], say: Speaker) -> int:
    check_torch("tune")
    from dflash_local.pairs import tuned
    from dflash_local.pairs.address import read_address
    from dflash_local.pairs.find import drafter_name, find_pair
    from dflash_local_tune.fitting import TuneOptions, tune
    from dflash_local_tune.state import output_for

    files = find_pair(values["target"], values["draft"], say=say, bars=not values["quiet"])
    draft, checkpoint = files.draft, _checkpoint_of(values["draft"])
    if draft is None or not draft.is_file():
        name = files.target.name
        raise InputError(f"{name}: has no drafter to begin with; give one with --draft")
    address = read_address(values["target"])
    given = Path(values["draft"] or values["target"]).exists()
    options = TuneOptions(
        target=files.target,
        draft=draft,
        name=str(address),
        source=tuned.source_of(files.target, draft) or drafter_name(address, values["draft"]),
        data=values["data"],
        # Beside the folder that was given, or the drafter's file.
        output=values["output"] or output_for(checkpoint or draft, given),
        checkpoint=checkpoint,
        lora=values["lora"] or (),
        control_vectors=values["control_vectors"] or (),
        **{name: values[name] for name in _AS_GIVEN},
    )
    busy = partial(is_busy, values["yield_to"])
    card = trained(partial(tune, options, progress=_teller(say), busy=busy), values, say)
    if card is None:
        return INTERRUPTED
    target = shlex.quote(str(values["target"]))
    if card.won and not card.is_default:
        say(f"give it with the adapters: --draft {shlex.quote(str(card.after))}")
    elif card.won:
        say(f"it is now the default; `dflash-local tune {target} --undo` goes back")
    else:
        say("the old drafter stays the default")
    return 0


def trained(run: Callable[..., Card], values: Mapping[str, Any], say: Speaker) -> Card | None:
    """Run a training, and print its result; None if Ctrl-C ended it."""
    from dflash_local.bench.report.cell import table
    from dflash_local_tune.card import cells
    from dflash_local_tune.fitting import Interrupted

    stop = threading.Event()
    with interrupt.setting(stop):
        try:
            card = run(say=say, stopped=stop.is_set)
        except Interrupted:
            say("interrupted; the same command goes on from here")
            return None
    if values["as_json"]:
        write_json(card.as_dict())
    else:
        figures = table(cells(card.rows), stdout_columns())
        write_report(f"{figures}\n\n{card.reason}\n{card.after}\n")
    return card


def is_busy(url: str) -> bool:
    """True if a server of this program answers requests there. One that asks for a key does not
    say, and counts as idle."""
    try:
        return any(slot["is_processing"] for slot in fetched(url, "/slots"))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_torch(command: str) -> None:
    """Raises InputError unless PyTorch and safetensors can be loaded."""
    for name in ("torch", "safetensors.torch"):
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that it needs: ImportError, OSError, RuntimeError
            package = name.partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                raise InputError(f"{command} needs {package}: {_INSTALL}") from None
            told = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"{command} needs {package}, which is installed here but cannot be loaded: {told}; "
                f"install it again: {_INSTALL} --force-reinstall {package}"
            ) from None


def _checkpoint_of(draft: str | None) -> Path | None:
    """The folder with the drafter's safetensors, if one was given."""
    folder = Path(draft or "")
    has_weights = draft is not None and folder.is_dir() and any(folder.glob("*.safetensors"))
    return folder if has_weights and not any(folder.glob("*.gguf")) else None


def _teller(say: Speaker) -> Callable[[Progress], None]:
    """Tells how far the training is, a line for each twentieth of it."""
    told = -1

    def tell(now: Progress) -> None:
        nonlocal told
        line = (
            f"step {now.step}, {now.done:.0%}, {duration(now.seconds_left)} left; held-out "
            f"tokens per round: {now.length_before:.2f} before, {now.length:.2f} now"
        )
        part = int(20 * now.done)
        if part > told:
            told = part
            say(line)

    return tell


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
