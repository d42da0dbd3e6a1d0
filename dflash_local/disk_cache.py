"""Results that are measured once on this machine and kept: verdicts on files, costs, exactness.

All of them can be measured again, so a folder that cannot be used is not an error.
"""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import platformdirs

ENVIRONMENT = "DFLASH_LOCAL_CACHE"


def place(variable: str = ENVIRONMENT, kind: Literal["cache", "data"] = "cache") -> Path:
    """The path of this user's folder for what can be measured again, or for other data: that of
    the environment's `variable` if it is set, else the platform's. It need not exist. Raises
    OSError for a user without a home."""
    if chosen := os.environ.get(variable):
        # Unlike `Path.expanduser`, this leaves the name of a user that there is not as it is.
        return Path(os.path.expanduser(chosen))
    platform = platformdirs.PlatformDirs("dflash-local", appauthor=False, opinion=False)
    try:
        found = platform.user_cache_path if kind == "cache" else platform.user_data_path
    except RuntimeError:
        found = Path()
    if not found.is_absolute():
        raise OSError(f"this user has no home folder; set {variable}")
    return found


def folder() -> Path:
    """The cache folder of this user, created if it is missing. Raises OSError."""
    found = place()
    found.mkdir(parents=True, exist_ok=True)
    return found


def read(kind: str, key: Mapping[str, Any]) -> Any:
    """The value that `write` stored under `key`; None if it is missing or cannot be read."""
    try:
        with open_own(_file(kind, key)) as file:
            return json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None


def open_own(path: Path) -> BufferedReader:
    """A file of a cache, to be read: a regular one, of this user or of root.

    Raises OSError for anything else. A pipe would be waited for; a link, or the file of another
    user, could hold data that this user never wrote.
    """
    flags = [getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")]
    descriptor = os.open(path, os.O_RDONLY | sum(flags))
    stat_ = os.fstat(descriptor)
    own = not hasattr(os, "geteuid") or stat_.st_uid in (0, os.geteuid())
    if not stat.S_ISREG(stat_.st_mode) or not own:
        os.close(descriptor)
        raise OSError("it is no regular file of this user")
    return open(descriptor, "rb")


def write(kind: str, key: Mapping[str, Any], content: Any) -> None:
    """Store `content` as JSON, completely or not at all. `key` names all that it depends on."""
    with contextlib.suppress(OSError):
        write_json(_file(kind, key), content)


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write `content` to a file, completely or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=indent)
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise


def _file(kind: str, key: Mapping[str, Any]) -> Path:
    whole = json.dumps(key, sort_keys=True, default=str).encode()
    return folder() / kind / f"{hashlib.sha256(whole).hexdigest()[:32]}.json"
