"""`dflash-local chat`: one answer, or a conversation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from .loading import check_options, load_model
from .options import (
    CHAT,
    ENDING,
    FILES,
    LOADING,
    REPORTING,
    SAMPLING,
    SectionedCommand,
    generation_arguments,
    max_tokens,
)
from .prompt_text import read_prompt, read_text
from .report import speaker
from .single import run_single
from .values import utf8_text

SECTIONS = {
    "Model": FILES,
    "Chat": CHAT,
    "Answer": (max_tokens(1024), *ENDING),
    "Sampling": SAMPLING,
    "Output": REPORTING,
    "Machine": LOADING,
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("prompt", type=utf8_text, required=False)
@click.pass_context
def chat(ctx: click.Context, /, prompt: str | None, **values: Any) -> None:
    """Answer PROMPT, or hold a conversation.

    With PROMPT, or - for standard input, the answer goes to stdout and nothing else does. Without
    it a conversation begins in the terminal: Enter sends, Alt-Enter or a backslash at the end of
    a line begins another, Ctrl-C stops an answer, Ctrl-D leaves, /help tells the rest. Where
    standard input is no terminal, all of it is the prompt.
    """
    check_options(values)
    text = read_prompt(prompt)
    if text is None and values["as_json"]:
        raise click.UsageError("--json answers one prompt: give PROMPT, or - for standard input.")
    if text is not None and not text.strip():
        raise click.UsageError("the prompt is empty: give PROMPT some text.")
    grammar = read_text(Path(values["grammar_file"])) if values["grammar_file"] else None
    arguments = generation_arguments(values, grammar)
    template = dict(values["chat_template_kwargs"] or {})
    if values["no_thinking"]:
        template["enable_thinking"] = False
    arguments["chat_template_kwargs"] = template or None

    system = values["system"]
    opening = [] if system is None else [{"role": "system", "content": system}]
    say = speaker(values["quiet"])
    with load_model(values, say) as model:
        if text is None:
            # Only here: the line editor takes longer to import than all the rest.
            from .conversation import COMMANDS, Conversation
            from .line_editor import LineEditor

            talk = Conversation(model, opening, arguments, compare=values["compare"], say=say)
            talk.run(LineEditor(COMMANDS))
            return
        messages = [*opening, {"role": "user", "content": text.rstrip("\r\n")}]
        code = run_single(model, partial(model.stream_chat, messages, **arguments), values, say)
    ctx.exit(code)
