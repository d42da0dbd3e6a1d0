"""Text from files and clients, as a terminal may show it."""

import sys
from contextlib import suppress

_SPACE = frozenset("\n\t")
_REORDERING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL = (*range(0x20), 0x7F, *range(0x80, 0xA0))
_VISIBLE = {
    n: "\N{REPLACEMENT CHARACTER}" for n in (*_CONTROL, *_REORDERING) if chr(n) not in _SPACE
}


def printable(line: str) -> str:
    """A line in which invisible characters are replaced. Names in it may come from a file, and such
    characters could change the terminal's settings, or the order of the text."""
    return "".join(
        c if c.isprintable() or c in _SPACE else "\N{REPLACEMENT CHARACTER}" for c in line
    )


def silent(_: object) -> None:
    """Tell nobody, where something that tells is expected."""


def to_stderr(line: str) -> None:
    """Print a line about something, if there is a stderr."""
    if sys.stderr is not None:  # else print would take stdout
        with suppress(OSError, ValueError):  # it may have been closed
            print(printable(line), file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """Text in any language, with its control and reordering characters replaced."""
    return text.translate(_VISIBLE)
