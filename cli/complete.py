"""`dflash-local complete`: continue raw text."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import dflash_local

from . import options as shared
from .answer import Ask
from .chat import USUAL_OPTIONS
from .loading import check_options, load_model
from .options import Option, SectionedCommand
from .request import read_prompt, run_single
from .settings import FROM_ELSEWHERE
from .terminal import Speaker
from .values import utf8_text

FILE = Option(
    "-f --file",
    "Read the prompt from this file, - for standard input.",
    type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True),
)

SECTIONS = {
    "Prompt": (FILE,),
    "Model": shared.FILES,
    "Answer": (shared.max_tokens(default=256), *shared.ENDING),
    "Sampling": shared.SAMPLING,
    "Output": shared.REPORTING,
    "Machine": shared.LOADING,
}


@click.command(
    cls=SectionedCommand, sections=SECTIONS, usual=(*USUAL_OPTIONS, "file"), epilog=shared.WORDS
)
@click.argument("prompt", type=utf8_text, required=False)
@click.pass_context
def complete(ctx: click.Context, /, prompt: str | None, **values: Any) -> int:
    """Continue PROMPT, the text of -f FILE, or standard input (-).

    The text goes to the model byte for byte, without a chat template. Names of special tokens,
    such as <|im_start|>, become these tokens. Only the continuation is written to stdout.
    """
    check_options(values)
    file = values["file"]
    from_elsewhere = ctx.get_parameter_source("file") in FROM_ELSEWHERE
    text = read_prompt(prompt, None if prompt is not None and from_elsewhere else file)
    if text is None:
        raise click.UsageError("no prompt: give PROMPT, -f FILE, or - for standard input.")
    if not text:
        raise click.UsageError("the prompt is empty: there is nothing to continue.")
    arguments = shared.generation_arguments(values)

    def ask_of(model: dflash_local.Model) -> Ask:
        tokens = model.target.vocabulary.tokenize(text, n_ctx=model.n_ctx)
        return partial(model.stream, tokens, **arguments)

    say = Speaker(values["quiet"])
    with load_model(values, say, check=lambda model: ask_of(model)()) as model:
        return run_single(model, ask_of(model), values, say)
