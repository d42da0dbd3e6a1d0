"""`dflash-local train`: make a drafter for a model that has none."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_local.cli.options import LOADING, QUIET, Option, SectionedCommand
from dflash_local.cli.request import INTERRUPTED
from dflash_local.cli.terminal import Speaker
from dflash_local.cli.values import WholeText, number, whole
from dflash_local_tune.commands.tune import answer_tokens, check_torch, duration, trained

if TYPE_CHECKING:
    from dflash_local_tune.fitting import Progress

_MACHINE = ("n_gpu_layers", "n_threads")
_TRAINING = (
    *("data", "teacher_text", "n_ctx", "max_tokens", "begin", "block_size", "n_layer"),
    *("minutes", "steps", "n_written"),
)
_TELL_S = 15.0

SECTIONS = {
    "Texts": (
        Option(
            "--data",
            type=click.Path(exists=True, path_type=Path),
            help="Texts or prompts of your own, as for `tune`. Without them the model writes its "
            "own prompts.",
        ),
        Option(
            "--teacher-text",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Answers that are written already: a JSON object on each line with prompt or "
            "messages, and answer. Half of the training learns them.",
        ),
        Option(
            "--ctx n_ctx",
            of="train",
            type=whole(256, 1 << 16),
            default=768,
            help="Tokens of a prompt and its answer together; longer prompts are left out.",
        ),
        answer_tokens("train"),
    ),
    "Drafter": (
        Option(
            "--from begin",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            metavar="FOLDER",
            show_default="random weights",
            help="Begin with what an earlier run left: its folder, or one with its config.json and "
            "model.safetensors.",
        ),
        Option(
            "--block block_size",
            type=whole(2, 64),
            show_default="8, or 16 from a hidden size of 1024 on; with --from that of the drafter",
            help="Tokens of a block.",
        ),
        Option(
            "--layers n_layer",
            type=whole(1, 64),
            show_default="4, or 5 from a hidden size of 1024 on",
            help="Layers of the drafter.",
        ),
    ),
    "Training": (
        Option(
            "--minutes",
            type=number(0, 1e6, above=True),
            default=60,
            help="End after so long, the measurement in the end included. What comes before the "
            "training, loading and the first texts, is not cut short.",
        ),
        Option("--steps", type=whole(1, 10**7), default=10**6, help="Train at most so many steps."),
        Option(
            "--written n_written",
            type=whole(1, 256),
            show_default="256 on a GPU, 8 on a CPU",
            help="Texts that the model writes at once.",
        ),
    ),
    "Machine": tuple(each for each in LOADING if each.name in _MACHINE),
    "Output": (
        Option(
            "-o --output",
            of="train",
            type=click.Path(path_type=Path),
            metavar="FOLDER",
            show_default="<target>-dflash in the working folder",
            help="A new folder for the drafter: GGUF, safetensors and a card.",
        ),
        Option("--json as_json", is_flag=True, help="Print one JSON object about the result."),
        QUIET,
    ),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("target", type=WholeText())
def train(target: str, **values: Any) -> int:
    """Make a drafter for a model that has none.

    TARGET is a model's GGUF file, folder or name. It writes prompts and answers them, and a new
    drafter learns to draft these answers. In the end it is measured on prompts that were held out.
    Where it is faster than plain decoding, it becomes the target's default on this machine. After
    Ctrl-C the same command goes on. Where somebody has published a drafter for the model, take
    that: it was trained for days.
    """
    say = Speaker(values["quiet"])
    check_torch("train")
    from dflash_local.pairs.address import read_address
    from dflash_local.pairs.find import drafter_name, find_pair
    from dflash_local_tune.new import options_for, train

    path = find_pair(target, None, say=say, bars=not values["quiet"]).target
    output = values["output"] or Path(f"{path.stem}-dflash")
    given = {name: values[name] for name in (*_TRAINING, *_MACHINE)}
    address = read_address(target)
    if known := drafter_name(address):  # where that one drafts, the new one will
        given["source"] = known
    options = options_for(path, output, name=str(address), **given)
    card = trained(partial(train, options, progress=_teller(say)), values, say)
    if card is None:
        return INTERRUPTED
    if card.is_default:
        say(f"it is now the default; `dflash-local tune {target} --undo` goes back")
    return 0


def _teller(say: Speaker) -> Callable[[Progress], None]:
    """Tells how far the training is, each quarter of a minute."""
    at, steps, tokens, answers_s = time.monotonic(), 0, 0, 0.0

    def tell(now: Progress) -> None:
        nonlocal at, steps, tokens, answers_s
        spent = max(1e-9, time.monotonic() - at)
        if spent < _TELL_S and now.done < 1:
            return
        answering = now.answers_s - answers_s
        say(
            f"step {now.step}, {now.done:.0%}, {duration(now.seconds_left)} left; "
            f"{(now.step - steps) / spent:.1f} steps/s, "
            f"{(now.n_tokens - tokens) / max(1e-9, answering):,.0f} tokens/s of answers in "
            f"{answering / spent:.0%} of the time; loss {now.loss:.2f}; "
            f"held-out tokens per round: {now.length:.2f}"
        )
        at, steps, tokens, answers_s = time.monotonic(), now.step, now.n_tokens, now.answers_s

    return tell
