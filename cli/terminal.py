"""All that the user reads beside the answers: lines on stderr, dim on a terminal, and never inside
an answer."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

import click

from dflash_local.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

_GAP = re.compile(r" {2,}")
"""Between two cells of a row."""


def is_rich(stream: TextIO) -> bool:
    """True if `stream` is a terminal that can do more than show lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def open_console(stream: TextIO) -> Console:
    """Rich's console on a terminal. It follows NO_COLOR, and shows text as it is."""
    # Imported only here: a pipe does not need it.
    from rich.console import Console

    class _Console(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # a bar that Ctrl-C ends would leave it hidden

    return _Console(
        file=stream, force_terminal=True, highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def fitted(text: str, columns: int) -> str:
    """The lines of `text` broken between words."""
    lines = []
    for line in text.splitlines():
        cells = _GAP.split(line.strip())
        if len(line) <= columns or len(cells) > 2:
            lines.append(line)
            continue
        indent = len(line.rstrip()) - len(cells[-1])
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent=" " * (indent if 2 * indent <= columns else 0),
            replace_whitespace=False,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "".join(f"{line}\n" for line in lines)


class Speaker:
    """Shows the user lines on stderr, unless `quiet`. Any thread may call it.

    Lines that come while an answer is written wait until its end.
    """

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.in_line = False
        """True if the answer so far does not end with a line break."""
        self._lock = threading.RLock()
        self._held: list[str] | None = None

    @cached_property
    def console(self) -> Console | None:
        """The terminal for bars of progress; None if there is none, or it is to be quiet."""
        return None if self.quiet else self._terminal

    @cached_property
    def _terminal(self) -> Console | None:
        return open_console(sys.stderr) if is_rich(sys.stderr) else None

    def __call__(self, line: str) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(line)
            elif not self.quiet:
                self.write(line, "dim")

    def write(self, line: str, style: str | None = None) -> None:
        """Show a line that was asked for: at once, and also with `quiet`."""
        line = printable(line)
        if console := self._terminal:
            text = fitted(line, console.width) or "\n"
            console.print(text, style=style, soft_wrap=False, end="")
        else:
            click.echo(line, err=True)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hold lines back while an answer is written. Set `in_line` if it ends within a line."""
        with self._lock:
            self._held, self.in_line = [], False
        try:
            yield
        finally:
            with self._lock:
                held, self._held = self._held, None
                if self.in_line and not self.quiet:
                    click.echo(err=True)  # stderr may be shown where stdout is
                for line in held or ():
                    self(line)
