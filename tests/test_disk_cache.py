"""The place of measured results on disk."""

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


@pytest.mark.skipif(os.name != "posix", reason="needs links and pipes")
def test_what_is_kept_is_read_from_a_file_of_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk_cache.ENVIRONMENT, str(tmp_path))
    key = {"a": 1}
    disk_cache.write("kind", key, "kept")
    assert disk_cache.read("kind", key) == "kept"
    (place,) = (tmp_path / "kind").iterdir()
    other = place.rename(tmp_path / "elsewhere")
    place.symlink_to(other)
    assert disk_cache.read("kind", key) is None
    place.unlink()
    os.mkfifo(place)
    assert disk_cache.read("kind", key) is None
