"""The file of a projector, with which a target reads images: which one, and its room."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_local.errors import DflashError, FileError
from dflash_local.fit.inspection import PROJECTOR
from dflash_local.fit.options import AUTO, NONE
from dflash_local.fit.placement import usable_gpus
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device, libmtmd
from dflash_local.pairs import gguf_names
from dflash_local.pairs.find import fetched_projector

_COMPUTED_IN = 512 << 20
"""Bytes of a GPU that libmtmd takes for the largest pictures that models see, beside weights."""


def find_projector(
    target: Path, given: str | os.PathLike[str] | None, say: Callable[[str], None]
) -> Path | None:
    """The projector's file for a target: the one given, or the only one beside it if it is the only
    target there; for "auto" as `fetched_projector`. Raises FileError for one that is none,
    InputError where "auto" finds none, and BackendError without libmtmd."""
    word = None if given is None else os.fspath(given)
    if word == NONE:
        return None
    if word is None:
        names = [file.name for file in target.parent.glob("*.gguf")]
        beside = gguf_names.projectors(names)
        if len(beside) != 1 or len(gguf_names.targets(names)) != 1:
            return None
        path = target.parent / next(iter(beside.values()))[0]
    else:
        path = fetched_projector(target, say) if word == AUTO else Path(word)
    try:
        file = GgufFile.open(path)
        if file.architecture != PROJECTOR:
            raise FileError(f"{path}: no projector, but a model of kind {file.architecture}")
        libmtmd()
    except DflashError as error:
        if given is not None:
            raise
        say(f"images are not read: {error}")
        return None
    if word in (None, AUTO):
        say(f"images: {path.name}")
    return path


def without_projector(
    devices: Sequence[Device], path: str | os.PathLike[str] | None
) -> list[Device]:
    """The devices with less room, as the first GPU holds a projector and what it computes in."""
    if path is None or not (gpus := usable_gpus(devices)):
        return list(devices)
    n_bytes = os.stat(path).st_size + _COMPUTED_IN
    return [
        replace(device, free=max(0, device.free - n_bytes)) if device == gpus[0] else device
        for device in devices
    ]
