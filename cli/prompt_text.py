"""Where a prompt comes from: the command line, a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

import click


def read_prompt(argument: str | None, file: str | None = None) -> str | None:
    """The prompt as text, byte for byte; None if none was given and stdin is a terminal.

    `-` in either place is standard input, which is also read where neither is given and it is no
    terminal. Raises click.UsageError for both at once and for text that is not UTF-8.
    """
    if argument is not None and file is not None:
        raise click.UsageError("PROMPT and -f FILE are both given: leave out one of them.")
    if file is not None and file != "-":
        return read_text(Path(file))
    if argument is not None and argument != "-":
        return argument
    if file is None and argument is None and (sys.stdin is None or sys.stdin.isatty()):
        return None
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: give PROMPT instead of -.")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, its line ends as they are. Raises OSError, click.UsageError."""
    return _decoded(path.read_bytes(), str(path))


def _decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"{source} is not UTF-8 text (byte {raw[error.start]:#04x} at {error.start}): "
            "convert it first."
        ) from None
