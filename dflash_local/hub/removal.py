"""Removes files from the hub client's cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from dflash_local.hub.repository import cache_folder


def remove_files(repo: str, names: Iterable[str]) -> int:
    """Remove these files of `repo` at every commit, and their bytes; the number of bytes freed."""
    place = cache_folder(repo)
    freed = 0
    if place is None:
        return 0
    for name in names:
        for link in (place / "snapshots").glob(f"*/{_escaped(name)}"):
            # where links are not supported, the file itself lies there
            blob = Path(os.path.realpath(link))
            with contextlib.suppress(OSError):
                freed += blob.stat().st_size
                link.unlink()
                if blob != link:
                    blob.unlink(missing_ok=True)
    return freed


def _escaped(name: str) -> str:
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)
