"""Drafters that are converted on arrival, and where they are kept."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_local import disk_cache
from dflash_local.errors import InputError
from dflash_local.hub.repository import Repository, remove_files

OUTTYPE = "q8_0"
SHARE = 0.54
"""Bytes in Q8_0 for each byte in BF16: 34 bytes hold 32 values."""
_KIND = "drafters"
_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class Kept:
    """A converted drafter on this disk."""

    path: Path
    commit: str
    """Of the hub's repository; empty for a local folder."""


def kept_drafter(drafter: str, target: str) -> Kept | None:
    """The drafter of the repository or folder `drafter`, as it was converted for `target`."""
    found = disk_cache.read(_KIND, _key(drafter, target))
    if not isinstance(found, dict):
        return None
    try:
        # by its name, so that the cache can be moved
        kept = Kept(disk_cache.folder() / _KIND / Path(found["file"]).name, str(found["commit"]))
    except (KeyError, TypeError):
        return None
    return kept if kept.path.is_file() else None


def weights(repository: Repository) -> list[str]:
    """The files of a drafter's weights at the top of its repository."""
    return [name for name in repository.sizes if name.endswith(_WEIGHTS) and "/" not in name]


def converted(
    drafter: str,
    target: str,
    target_file: Path,
    repository: Repository | None,
    say: Callable[[str], None],
) -> Path:
    """Convert `drafter`, a hub id or a folder, against the target's file, and keep the result.

    Weights that were fetched for this alone are removed afterwards, so that nothing is held twice.
    Raises InputError, as the converter does.
    """
    from dflash_local.convert import convert

    fetched = repository.missing(weights(repository)) if repository else []
    commit = repository.commit if repository else ""
    folder = disk_cache.folder() / _KIND
    folder.mkdir(parents=True, exist_ok=True)
    # other drafters and targets may have the same last names
    digest = hashlib.sha256(f"{drafter} {target}".encode()).hexdigest()[:8]
    name = f"{_plain(drafter)}-for-{_plain(target)}-{digest}-{OUTTYPE}.gguf"
    result = convert(
        drafter,
        target=target_file,
        outtype=OUTTYPE,
        output=folder / name,
        revision=commit or None,
        force=True,
    )
    for note in result.notes:
        say(note)
    say(f"converted {drafter} for this target: {result.path}")
    disk_cache.write(_KIND, _key(drafter, target), {"file": name, "commit": commit})
    if repository is not None:
        remove_files(repository.name, fetched)
    return result.path


def forget_drafter(drafter: str, target: str) -> int:
    """Remove the converted file; the bytes that this frees."""
    kept = kept_drafter(drafter, target)
    if kept is None:
        return 0
    size = kept.path.stat().st_size
    try:
        kept.path.unlink()
    except OSError as error:
        raise InputError(f"{kept.path}: cannot be removed: {error.strerror}") from None
    return size


def _key(drafter: str, target: str) -> dict[str, str]:
    return {"drafter": drafter, "target": target, "outtype": OUTTYPE}


def _plain(name: str) -> str:
    """A hub id or a path as part of a file's name."""
    known = Path(name).stem if os.path.exists(name) else name.rpartition("/")[2]
    return known.lower()
