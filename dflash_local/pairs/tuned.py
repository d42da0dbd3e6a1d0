"""Drafters that were tuned on this machine: which of them a target uses, and used before."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from dflash_local.errors import InputError

ENVIRONMENT = "DFLASH_LOCAL_TUNED"
_FILE = "tuned.json"


def folder() -> Path:
    """Where tuned drafters are kept, and which target uses which: `DFLASH_LOCAL_TUNED`, else the
    platform's folder for data. It need not exist."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_data_path("dflash-local", appauthor=False)


def tuned_drafter(target: Path) -> Path | None:
    """The drafter that was tuned for this file, if it is its default and still there."""
    for path in reversed(_read().get(_key(target), [])):
        return Path(path) if Path(path).is_file() else None
    return None


def make_default(target: Path, drafter: Path) -> None:
    """From now on `drafter` drafts for this file, unless another one is named. Raises
    InputError."""
    known = _read()
    known.setdefault(_key(target), []).append(str(drafter.resolve()))
    _write(known)


def undo(target: Path) -> Path:
    """Go back to what the file used before; the drafter that is its default no longer. Raises
    InputError if there is none."""
    known = _read()
    mine = known.get(_key(target), [])
    if not mine:
        raise InputError(f"{target.name}: no tuned drafter is its default, so nothing to undo")
    last = mine.pop()
    if not mine:
        del known[_key(target)]
    _write(known)
    return Path(last)


def _key(target: Path) -> str:
    """The hub's cache names a link by its commit, and the file behind it by its content."""
    return str(target.resolve())


def _read() -> dict[str, list[str]]:
    path = folder() / _FILE
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; mend or remove it") from None
    if not isinstance(found, dict) or not all(isinstance(each, list) for each in found.values()):
        raise InputError(f"{path}: holds no drafters by target; remove it")
    return {target: list(map(str, drafters)) for target, drafters in found.items()}


def _write(known: dict[str, list[str]]) -> None:
    path = folder() / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
