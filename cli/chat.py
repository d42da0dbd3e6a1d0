"""`dflash-local chat`: one answer, or a conversation in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from dflash_local.errors import InputError
from dflash_local.printable import printable

from .answer import answer, write_stdout
from .loading import check_options, check_prompt, load_model
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
from .report import Say, speaker, stats_page, summary
from .request import read_prompt, run_single
from .values import utf8_text

if TYPE_CHECKING:
    from dflash_local import Model, Result

    from .line_editor import LineEditor

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the conversation so far",
    "/stats": "show statistics of the last answer, the load plan and how exact verification is",
    "/exit": "leave, as Ctrl-D does",
}

KEYS = (
    "Enter sends. Alt-Enter, or a backslash before Enter, begins a new line; so does Enter",
    'between """ and """. Up and down walk through earlier messages.',
    "Ctrl-C stops an answer, or clears what is typed.",
)

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

    With PROMPT, or - for standard input, the answer is all that is written to stdout. Without it
    a conversation begins in the terminal: Enter sends, Alt-Enter or a backslash at the end of a
    line begins a new line, Ctrl-C stops an answer, Ctrl-D leaves, /help shows the rest. If
    standard input is not a terminal, all of it is the prompt.
    """
    check_options(values)
    check_prompt(prompt)
    text = read_prompt(prompt)
    if text is None and values["as_json"]:
        raise click.UsageError("--json answers one prompt: give PROMPT, or - for standard input.")
    if text is not None and not text.strip():
        raise click.UsageError("the prompt is empty: give PROMPT some text.")
    arguments = generation_arguments(values)
    arguments["chat_template_kwargs"] = values["chat_template_kwargs"]

    system = values["system"]
    opening = [] if system is None else [{"role": "system", "content": system}]
    say = speaker(values["quiet"])
    with load_model(values, say, thinking=values["thinking"]) as model:
        if text is None:
            # Imported only here, because prompt_toolkit takes longer than all the rest.
            from .line_editor import LineEditor

            session = ChatSession(model, opening, arguments, compare=values["compare"], say=say)
            session.run(LineEditor(COMMANDS))
            return
        messages = [*opening, {"role": "user", "content": text.rstrip("\r\n")}]
        code = run_single(model, partial(model.stream_chat, messages, **arguments), values, say)
    ctx.exit(code)


class ChatSession:
    """A conversation in the terminal: its messages, which begin with `opening`, and its loop.

    An answer that was stopped stays, as far as it came. A message that cannot be answered, such as
    one that is longer than the context, is taken back.
    """

    def __init__(
        self,
        model: Model,
        opening: Sequence[Mapping[str, str]],
        arguments: Mapping[str, Any],
        *,
        compare: bool,
        say: Say,
    ) -> None:
        self._model = model
        self._arguments = dict(arguments)
        self._compare = compare
        self._say = say
        self._opening = tuple(opening)
        self.messages = list(opening)
        self.last: Result | None = None
        self._actions: dict[str, Callable[[], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/stats": self._stats,
        }

    def run(self, editor: LineEditor) -> None:
        """Read and answer messages until `/exit` or Ctrl-D."""
        self._say("type a message; /help lists commands and keys")
        while True:
            try:
                message = editor.read()
                if message.strip() == "/exit":
                    return
                self.take(message)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return

    def take(self, message: str) -> None:
        """Answer one message, or carry out a command."""
        if not message.strip():
            return
        action = self._actions.get(message.strip())
        if action is not None:
            action()
        elif re.fullmatch(r"/[a-z]+", message.strip()):
            print(printable(f"no command {message.strip()}; /help lists them"), file=sys.stderr)
        else:
            self._answer(message)

    def _answer(self, message: str) -> None:
        asked = [*self.messages, {"role": "user", "content": message}]
        ask = partial(self._model.stream_chat, asked, **self._arguments)
        try:
            result = answer(ask, write_stdout)
        except InputError as error:
            print(printable(f"error: {error} /reset starts a new conversation."), file=sys.stderr)
            return
        write_stdout("\n")
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        self.last = result
        self._say(summary(result, self._arguments["max_tokens"]))
        if self._compare and result.finish_reason != "cancelled":
            from .compare import compare

            compare(self._model, ask, result, self._arguments.get("draft_width"), self._say)

    def _help(self) -> None:
        width = max(map(len, COMMANDS)) + 2
        for name, text in COMMANDS.items():
            print(f"{name:{width}s}{text}", file=sys.stderr)
        for line in KEYS:
            print(line, file=sys.stderr)

    def _reset(self) -> None:
        self.messages = list(self._opening)
        self.last = None
        self._say("the conversation is forgotten")

    def _stats(self) -> None:
        for line in stats_page(self._model, self.last):
            print(printable(line), file=sys.stderr)
