"""From options to a loaded model; a line on stderr says which files were chosen for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dflash_local
from dflash_local.fit.options import NONE, WORDS, LoadOptions

from . import interrupt
from .options import LOADING, values_of
from .progress import loading_progress
from .terminal import Speaker

if TYPE_CHECKING:
    from dflash_local.pairs.find import PairFiles


def check_files(values: Mapping[str, Any]) -> None:
    """Raises click.UsageError for a drafter without its target, InputError for unknown names."""
    from dflash_local.pairs.address import read_address

    target, draft = values["target"], values["draft"]
    if draft is not None and target is None:
        raise click.UsageError(
            f"--draft {draft} is given without its target: add --target, or leave out --draft to "
            "use smollm2-135m."
        )
    for given in (target, draft):
        if given not in (None, *WORDS):
            read_address(given)


def check_drafter(values: Mapping[str, Any], why: str) -> None:
    """Refuse a target's file without a drafter, given or tuned, and without heads; names and
    folders may have a drafter of their own. Raises click.UsageError, InputError, FileError."""
    from dflash_local.pair import open_pair
    from dflash_local.pairs.tuned import tuned_drafter

    target, draft = values["target"], values["draft"]
    if target is None or draft is not None or not Path(target).is_file():
        return
    if tuned_drafter(Path(target)) is None and open_pair(target).draft is None:
        raise click.UsageError(f"{why}: add --draft.")


def check_options(values: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other, before any work. Raises click.UsageError."""
    check_files(values)
    if values["compare"]:
        check_drafter(values, "--compare needs a drafter to compare with")
    if values["compare"] and values["draft_width"] in (0, 1):
        raise click.UsageError(
            f"--compare with --draft-width {values['draft_width']} would compare plain decoding "
            "with itself: leave out one of them."
        )


def check_prompt(prompt: str | None) -> None:
    """Refuse a prompt that only names a model. Raises click.UsageError."""
    from dflash_local.pairs import registry

    word = (prompt or "").strip()
    if (word.lower().endswith(".gguf") and "\n" not in word) or (word and registry.named(word)):
        raise click.UsageError(
            f"{word} names a model, and is no prompt: chat with it by `dflash-local run {word}`, "
            "or add --target."
        )


def load_model(
    values: Mapping[str, Any],
    say: Speaker,
    files: PairFiles | None = None,
    *,
    check: Callable[[dflash_local.Model], object] | None = None,
    **more: Any,
) -> dflash_local.Model:
    """The model that the options ask for. `files` are those of `chosen_files`, if they were looked
    up. `check` and `more` go to `dflash_local.load`."""
    options = {"draft_width": values.get("draft_width"), **values_of(LOADING, values)}
    files = files or chosen_files(values, say, LoadOptions(**options))
    more = {"thinking": values.get("thinking"), **more}
    with interrupt.ending(), loading_progress(say.console, files.target.name) as progress:
        model = dflash_local.load(
            files, say=say, progress=progress, check=check, **{**options, **more}
        )
    tell_missing_drafter(files.draft, model, say)
    return model


def tell_missing_drafter(draft: Path | None, model: dflash_local.Model, say: Speaker) -> None:
    """Once a target is loaded without one: an error of its file is to stand alone."""
    if model.drafter is None and str(draft) in ("None", NONE):
        say("without a drafter only copies of what the text repeats are drafted, where that pays")


def chosen_files(
    values: Mapping[str, Any], say: Speaker, options: LoadOptions | None = None
) -> PairFiles:
    """The files of --target and --draft, fetched if they are missing, or those of the usual pair.
    `options` say how they are to be loaded, so that nothing is fetched that does not fit."""
    from dflash_local.pairs.find import find_pair
    from dflash_local.pairs.registry import USUAL

    target, draft = values["target"], values["draft"]
    bars = not values.get("quiet")
    found = find_pair(target or USUAL, draft, say=say, options=options, bars=bars)
    if target is None:
        say(f"no --target: using {USUAL}, a tiny model for trying things out")
    return found
