"""Files that others have made: reads of bounded size, and one line for each fault."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from dflash_local.errors import FileError


def read_json(path: Path, limit: int, *, strict: bool = True) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises FileError.

    With `strict`, as `strict_json` reads it; else as Python does.
    """
    text = read_limited(path, limit)
    try:
        found = strict_json(text) if strict else json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        fail(path, f"not JSON: {error}")
    if not isinstance(found, dict):
        fail(path, f"holds a {type(found).__name__}, expected a JSON object")
    return found


def strict_json(text: bytes) -> Any:
    """`text` parsed as UTF-8 JSON. Raises ValueError, also for two equal keys and for NaN."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in found if keys.count(key) > 1)
            raise ValueError(f"{shown(twice)} occurs twice")
        for text in (*found, *found.values()):
            if isinstance(text, str) and not _is_text(text):
                raise ValueError(f"{shown(text)} is no valid text")
        return found

    def integer(digits: str) -> int:
        # Python takes quadratic time for long ones
        if len(digits) > 20:
            raise ValueError("an integer has more than 20 digits")
        return int(digits)

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=integer,
            parse_constant=constant,
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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


def shown(name: object) -> str:
    """`name` from a file as a message may show it: quoted, one line, not long."""
    text = ascii(name)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
