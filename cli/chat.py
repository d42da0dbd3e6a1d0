"""`dflash-local chat`: one answer, or a conversation in the terminal."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

import dflash_local

from . import options as shared
from .answer import Ask
from .loading import check_options, check_prompt, load_model
from .options import SectionedCommand
from .request import ANSWER_LENGTH, answer_limit, read_prompt, run_single
from .terminal import Speaker
from .user_files import history_file, tilde
from .values import utf8_text

SECTIONS = {
    "Model": shared.FILES,
    "Chat": shared.CHAT,
    "Answer": (shared.max_tokens(show_default=shared.USUAL.format(ANSWER_LENGTH)), *shared.ENDING),
    "Sampling": shared.SAMPLING,
    "Output": shared.REPORTING,
    "Machine": shared.LOADING,
}


USUAL_OPTIONS = (
    *("target", "draft", "system", "thinking", "max_tokens", "temperature", "seed"),
    *("draft_width", "n_ctx", "n_gpu_layers", "compare", "as_json", "quiet"),
)
"""Those that people set; -h shows no others."""

EPILOG = f"""\
{shared.WORDS}

\b
Messages typed in a conversation are kept in
  {tilde(history_file())}
"""


def _empty(prompt: str | None, target: str | None) -> str:
    if prompt not in (None, "-"):
        return "the prompt is empty: give PROMPT some text."
    only = f"; `dflash-local pull {target}` only fetches the model" if target else ""
    return (
        f"standard input is empty, so there is no prompt: give PROMPT, or a terminal to chat{only}."
    )


@click.command(cls=SectionedCommand, sections=SECTIONS, usual=USUAL_OPTIONS, epilog=EPILOG)
@click.argument("prompt", type=utf8_text, required=False)
def chat(prompt: str | None, **values: Any) -> int:
    """Answer PROMPT, or hold a conversation.

    With PROMPT, or - for standard input, the answer is all that is written to stdout. What is piped
    in goes before PROMPT, as in: cat f.py | dflash-local chat "explain this". Without a prompt a
    conversation begins in the terminal: Enter sends, Alt-Enter or a backslash at the end of a line
    begins a new line, Esc or Ctrl-C stops an answer, Ctrl-D leaves, /help shows the rest.
    """
    check_options(values)
    check_prompt(prompt)
    text = read_prompt(prompt, with_piped=True)
    if text is None and values["as_json"]:
        raise click.UsageError("--json answers one prompt: give PROMPT, or - for standard input.")
    if text is not None and not text.strip():
        raise click.UsageError(_empty(prompt, values["target"]))
    arguments = shared.generation_arguments(values)
    template = dict(values["chat_template_kwargs"] or {})
    system = values["system"]
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [*opening, {"role": "user", "content": (text or "").rstrip("\r\n")}]

    def ask_of(model: dflash_local.Model) -> Ask:
        arguments["max_tokens"] = answer_limit(model, arguments)
        return partial(model.stream_chat, messages, chat_template_kwargs=template, **arguments)

    say = Speaker(values["quiet"])
    check = (lambda model: ask_of(model)()) if text is not None else None
    model = load_model(values, say, check=check)
    if text is None:
        from .chat_session import ChatSession

        ChatSession(model, opening, template, values, say).run()
        return 0
    with model:
        return run_single(model, ask_of(model), {**values, **arguments}, say, is_chat=True)
