"""The folder of a run, and its state in there: written whole or not at all, and read with care."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dflash_local import disk_cache
from dflash_local.convert.files.lock import lock
from dflash_local.errors import InputError
from dflash_local.pairs import tuned

STATE, SETTINGS = "state.pt", "settings.json"


def output_for(draft: Path, given: bool) -> Path:
    """The folder of a tuned drafter: beside the old one if that is a file of the user's own, else
    where this program keeps its data. One that does not exist yet."""
    stem = (draft.name if draft.is_dir() else draft.stem).partition("-tuned")[0]
    caches = disk_cache.folder().resolve()
    is_own = given and caches not in draft.resolve().parents
    beside = draft.parent
    if not draft.is_dir() and beside.name == draft.stem and draft.stem != stem:
        beside = beside.parent  # tuned before, into a folder of its own
    folder = beside if is_own else tuned.folder() / "drafters"
    for n in range(1, 1000):
        found = folder / (f"{stem}-tuned" if n == 1 else f"{stem}-tuned-{n}")
        if not found.exists():
            return found
    raise InputError(f"{folder}: holds 999 tuned drafters of {stem}; choose a folder with -o")


def claim(part: Path, settings: dict[str, Any]) -> bool:
    """Make the folder of a run with these settings, of JSON; True if it is there already, left by
    the same run, which was interrupted. Raises InputError."""
    if part.exists():
        try:
            known = json.loads((part / SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        if known != settings:
            raise InputError(
                f"{part}: holds an interrupted run with other settings; repeat its command, remove "
                "the folder, or choose another with -o"
            )
        return True
    try:
        part.mkdir(parents=True)
        try:
            (part / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        except OSError:
            shutil.rmtree(part, ignore_errors=True)  # else it would be a run with other settings
            raise
    except OSError as error:
        raise InputError(f"{part}: cannot be written: {error.strerror}") from None
    return False


@contextmanager
def alone(part: Path) -> Iterator[None]:
    """Keep other runs out of a folder, where the system has such locks. Raises InputError."""
    with (part / SETTINGS).open("r+b") as file:
        taken = lock(file)
        if taken is False:
            raise InputError(
                f"{part}: another run is writing there; wait for its end, or choose another folder "
                "with -o"
            )
        if taken is None:
            file.close()  # Windows renames no folder in which a file is open
        yield


def write_state(state: Mapping[str, Any], place: Path) -> None:
    """Write it completely or not at all. Raises InputError."""
    partial = place.with_suffix(".new")
    try:
        torch.save(dict(state), partial)
        os.replace(partial, place)
    except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise InputError(
            f"{place}: cannot be written: {first_line(error)}; make room there, or choose another "
            "folder with -o"
        ) from None


def read_state(place: Path) -> dict[str, Any]:
    """Read the state that `write_state` wrote. Raises InputError."""
    with state_told(place):
        found: dict[str, Any] = torch.load(place, map_location="cpu", weights_only=True)
        bool(found["low_rank"])  # what is read first
    return found


@contextmanager
def state_told(place: Path) -> Iterator[None]:
    """A damaged state, or one of another version, as InputError with advice."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # pickle raises nearly anything
        raise InputError(
            f"{place}: cannot be read as the state of a run: {first_line(error)}; remove the "
            f"folder {place.parent} to begin again"
        ) from None


def first_line(error: Exception) -> str:
    """The first line of an error: those of PyTorch have many."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
