"""The place of measured results on disk."""

import os
import sys
from pathlib import Path

import pytest

import tiny_coder
from dflash_local import disk_cache, load
from dflash_local.errors import InputError
from dflash_local.pairs import registry, tuned


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


def test_a_user_that_is_not_there_has_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CACHE", "REGISTRY", "TUNED"):
        monkeypatch.setenv(f"DFLASH_LOCAL_{name}", f"~nobody-of-that-name/{name}")
    assert disk_cache.folder() == Path("~nobody-of-that-name/CACHE")
    assert tuned.folder() == Path("~nobody-of-that-name/TUNED")
    with pytest.raises(InputError, match="~nobody-of-that-name/REGISTRY: the registry cannot be"):
        registry.entries()


@pytest.mark.skipif(os.name != "posix", reason="elsewhere the system knows it otherwise")
def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in (
        "DFLASH_LOCAL_CACHE",
        "DFLASH_LOCAL_TUNED",
        "HOME",
        "XDG_CACHE_HOME",
        "XDG_DATA_HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="no home folder; set DFLASH_LOCAL_CACHE"):
        disk_cache.folder()
    assert disk_cache.read("costs", {}) is None
    with pytest.raises(InputError, match="no home folder; set DFLASH_LOCAL_TUNED"):
        tuned.folder()
    lines: list[str] = []
    with load(*tiny_coder.pair(), n_ctx=256, n_gpu_layers=0, say=lines.append) as model:
        assert model.generate("def f(", max_tokens=4).text
    assert any(line.startswith("this user has no home folder, so what was") for line in lines)


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
