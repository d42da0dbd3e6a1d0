"""The line editor of a conversation: history, several lines, completion of commands."""

import os
import sys
from collections.abc import Mapping

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output

from .user_files import history_file

QUOTES = '"""'


class LineEditor:
    """Reads one message at a time from the terminal.

    Enter sends the message. It begins a new line instead if the line ends with a backslash, which
    is removed, and inside a message between three double quotes. Alt-Enter always begins a new
    line, and pasted lines stay together. `input` and `output` are for programs that drive the
    editor.
    """

    def __init__(
        self,
        commands: Mapping[str, str],
        *,
        input: Input | None = None,
        output: Output | None = None,
        history: History | None = None,
    ) -> None:
        # Only answers go to stdout.
        terminal = sys.stderr if sys.stderr.isatty() or not sys.stdout.isatty() else sys.stdout
        self._session: PromptSession[str] = PromptSession(
            history=history if history is not None else open_history(),
            input=input,
            output=output or create_output(stdout=terminal),
            completer=WordCompleter(list(commands), meta_dict=dict(commands), sentence=True),
            complete_while_typing=False,
            multiline=True,
            enable_suspend=True,
            key_bindings=_keys(),
            prompt_continuation=lambda width, line, wrapped: "." * (width - 1) + " ",
        )

    def read(self, typed: str = "") -> str:
        """The next message, which begins with what is `typed` already. Raises EOFError on Ctrl-D,
        KeyboardInterrupt on Ctrl-C."""
        return unquoted(self._session.prompt("> ", default=typed))


def is_complete(document: Document) -> bool:
    """True if Enter sends the message at this place."""
    text = document.text.strip()
    if text.startswith(QUOTES):
        return len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES)
    return not document.current_line_before_cursor.endswith("\\")


def unquoted(message: str) -> str:
    """The message without the quotes around it."""
    text = message.strip()
    if len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES):
        return text[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def open_history() -> History:
    """Earlier messages: a file that only this user can read, or memory if it cannot be written."""
    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.document):
            buffer.validate_and_handle()
            return
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
