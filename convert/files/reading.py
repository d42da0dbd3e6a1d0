"""Files that others have made: reads of bounded size, and one line for each fault."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from dflash_local.errors import FileError


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises FileError."""
    data = read_limited(path, limit)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        fail(path, f"not JSON: {error}")
    if not isinstance(found, dict):
        fail(path, f"holds a {type(found).__name__}, expected a JSON object")
    return found


def read_limited(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes. Raises FileError."""
    try:
        size = regular_size(path)
        if size > limit:
            fail(path, f"{size} bytes, expected at most {limit}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def regular_size(path: Path) -> int:
    """Bytes of the file at `path`. Raises FileError unless it is a regular file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    # a pipe would block when opened
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        fail(path, f"{kind}, expected a file")
    return status.st_size


def unreadable(path: Path, error: Exception) -> FileError:
    """The FileError for `error`, met while reading `path`."""
    if isinstance(error, FileError):
        return error
    if isinstance(error, FileNotFoundError):
        return FileError(f"{path}: no such file")
    return FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def fail(path: str | os.PathLike[str], message: str) -> NoReturn:
    raise FileError(f"{path}: {message}")


def told(error: Exception) -> str:
    """A package's error for a message: one line, not long."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def shown(name: object) -> str:
    """`name` from a file as a message may show it: quoted, one line, not long."""
    text = ascii(name)
    return text if len(text) <= 100 else f"{text[:97]}..."
