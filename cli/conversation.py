"""A conversation in the terminal: messages in turn, commands that begin with a slash."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_local.errors import InputError

from .answer import answer, write_stdout
from .line_editor import LineEditor
from .report import Say, stats_page, summary

if TYPE_CHECKING:
    from dflash_local import Model, Result

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the conversation so far",
    "/stats": "show figures of the last answer, the load plan and how exact verification is",
    "/exit": "leave, as Ctrl-D does",
}

KEYS = (
    "Enter sends. Alt-Enter, or a backslash before Enter, begins a new line; so does Enter",
    'between """ and """. Up and down walk through earlier messages.',
    "Ctrl-C stops an answer, or clears what is typed.",
)


class Conversation:
    """The messages so far, which begin with `opening`, and the loop that adds to them.

    An answer that was stopped stays, as far as it came. A message that cannot be answered, such as
    one beyond the context, is taken back.
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
            print(f"no command {message.strip()}; /help lists them", file=sys.stderr)
        else:
            self._answer(message)

    def _answer(self, message: str) -> None:
        asked = [*self.messages, {"role": "user", "content": message}]
        ask = partial(self._model.stream_chat, asked, **self._arguments)
        try:
            result = answer(ask, write_stdout)
        except InputError as error:
            print(f"error: {error} /reset begins afresh.", file=sys.stderr)
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
            print(line, file=sys.stderr)
