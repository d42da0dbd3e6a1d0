"""Drafters that were tuned on this machine: which of them a target uses, and used before."""

import json
from pathlib import Path
from typing import Any

from dflash_local import disk_cache
from dflash_local.errors import InputError

ENVIRONMENT = "DFLASH_LOCAL_TUNED"
_FILE = "tuned.json"
_Tuned = dict[str, str]
"""The `path` of a tuned drafter, and its `source`: the name or path of the one before."""


def folder() -> Path:
    """The folder of tuned drafters, and of which target uses which: `DFLASH_LOCAL_TUNED`, else the
    platform's folder for data. It need not exist. Raises InputError for a user without a home."""
    try:
        return disk_cache.place(ENVIRONMENT, "data")
    except OSError as error:
        raise InputError(str(error)) from None


def tuned_drafter(target: Path, source: str | None = None) -> Path | None:
    """The drafter that was tuned for this file and became its default last, if it is still there:
    of those tuned from the drafter `source`, where one is given."""
    mine = [each for each in _read().get(_key(target), []) if source in (None, each["source"])]
    path = Path(mine[-1]["path"]) if mine else None
    return path if path and path.is_file() else None


def source_of(target: Path, drafter: Path) -> str | None:
    """The drafter from which the default one of this file was tuned. None for any other drafter."""
    mine = _read().get(_key(target), [])
    return next((each["source"] for each in mine if each["path"] == str(drafter.resolve())), None)


def make_default(target: Path, drafter: Path, source: str) -> None:
    """From now on `drafter` drafts for this file where the drafter `source`, which it was tuned
    from, would have done so, or where there is none. Raises InputError."""
    known = _read()
    new = {"path": str(drafter.resolve()), "source": source}
    known.setdefault(_key(target), []).append(new)
    _write(known)


def undo(target: Path, source: str | None = None) -> Path:
    """Go back to what the file used before, with `source` as for `tuned_drafter`; the drafter that
    is its default no longer. Raises InputError if there is none."""
    known = _read()
    mine = known.get(_key(target), [])
    last = next((each for each in reversed(mine) if source in (None, each["source"])), None)
    if last is None:
        raise InputError(f"{target.name}: no tuned drafter is its default, so nothing to undo")
    mine.remove(last)
    if not mine:
        del known[_key(target)]
    _write(known)
    return Path(last["path"])


def _key(target: Path) -> str:
    """The hub's cache names a link by its commit, and the file behind it by its content."""
    return str(target.resolve())


def _read() -> dict[str, list[_Tuned]]:
    path = folder() / _FILE
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; mend or remove it") from None
    try:
        return {
            target: [{key: str(each[key]) for key in ("path", "source")} for each in drafters]
            for target, drafters in found.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise InputError(f"{path}: holds no drafters by target; remove it") from None


def _write(known: dict[str, list[_Tuned]]) -> None:
    path = folder() / _FILE
    try:
        disk_cache.write_json(path, known, indent=1)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
