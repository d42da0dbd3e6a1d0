"""Text files that somebody names: read whole, or refused in one line."""

import os
import stat
import sys
from pathlib import Path
from typing import Any

from dflash_local.errors import FileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 30
"""Of one file. Nobody writes a longer text, and a wrong path may lead to all of a disk."""

_ALREADY_OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Files that a shell has opened for us, as in `<(command)`: a pipe that somebody writes to."""


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, its line ends and byte order mark as they are.

    A device or a pipe on disk may never begin, or never end, so it is refused. Raises FileError,
    OSError.
    """
    is_open = os.path.abspath(path).startswith(_ALREADY_OPEN)
    waits = 0 if is_open else getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its writer
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | waits)) as file:
        found = os.fstat(file.fileno())
        if stat.S_ISCHR(found.st_mode) and os.path.samestat(found, os.stat(os.devnull)):
            return ""
        if not (is_open or stat.S_ISREG(found.st_mode)):
            raise FileError(f"{Path(path)} is a device or a pipe: give the path of a file")
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise FileError(f"{Path(path)} is longer than {MOST_BYTES >> 30} GiB: give a shorter text")
    return decoded(raw, str(path))


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys and tables of a TOML file. Raises FileError, OSError."""
    text = read_text(path).removeprefix("\ufeff")
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not TOML: {error}") from None
    return tables


def decoded(raw: bytes, source: str) -> str:
    """The text of UTF-8 bytes; `source` is where they come from. Raises FileError."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{source} is not UTF-8 text (byte {raw[error.start]:#04x} at {error.start}): "
            "convert it first"
        ) from None
