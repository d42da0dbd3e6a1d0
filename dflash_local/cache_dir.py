"""The folder for what is measured once and kept: verdicts on files, costs of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = "DFLASH_LOCAL_CACHE"


def cache_dir() -> Path:
    """The cache folder of this user, created if it is not there.

    `DFLASH_LOCAL_CACHE` wins; else the platform's place for caches. Raises OSError when the folder
    cannot be made; what is kept there can be found anew, so callers go on without it.
    """
    folder = _chosen() or _of_platform() / "dflash-local"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _chosen() -> Path | None:
    chosen = os.environ.get(ENVIRONMENT)
    return Path(chosen).expanduser() if chosen else None


def _of_platform() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else _home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches"
    # the XDG specification has relative paths ignored
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return xdg if xdg.is_absolute() else _home() / ".cache"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise OSError(f"no home folder: {error}; set {ENVIRONMENT}") from None
