"""`dflash-local run`: chat with a model by its name, fetched at the first time."""

from typing import Any

import click

from .chat import SECTIONS as CHAT_SECTIONS
from .chat import USUAL_OPTIONS, chat
from .options import DRAFT, WORDS, SectionedCommand
from .values import utf8_text


@click.command(
    cls=SectionedCommand,
    sections={**CHAT_SECTIONS, "Model": (DRAFT,)},
    usual=USUAL_OPTIONS,
    epilog=WORDS,
)
@click.argument("model", type=utf8_text)
@click.argument("prompt", type=utf8_text, required=False)
@click.pass_context
def run(ctx: click.Context, /, model: str, prompt: str | None, **values: Any) -> int:
    """Chat with MODEL, or let it answer PROMPT.

    MODEL is a name of `dflash-local list`, as qwen3-8b or qwen3-8b:Q8_0, or what --target of the
    other commands takes. What is not on this disk is fetched: the model, and its drafter, which is
    converted. After that no network is needed. The rest is as in `dflash-local chat`.
    """
    code: int = ctx.invoke(chat, target=model, prompt=prompt, **values)
    return code
