"""The state of a run on the disk: written whole or not at all, and read back with care."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dflash_local.errors import InputError


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
