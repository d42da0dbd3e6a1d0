"""Where results of measurements are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflash_local import disk_cache


def test_the_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path / "chosen"))
    assert disk_cache.folder() == tmp_path / "chosen" and disk_cache.folder().is_dir()
    monkeypatch.delenv("DFLASH_LOCAL_CACHE")
    for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    assert (
        disk_cache.folder().is_relative_to(tmp_path / "home")
        and disk_cache.folder().name == "dflash-local"
    )
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert disk_cache.folder() == tmp_path / "home" / ".cache" / "dflash-local"
    assert os.path.isabs(disk_cache.folder())
