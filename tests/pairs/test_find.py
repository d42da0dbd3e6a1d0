"""The search for a pair, before anything is fetched."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_coder
from dflash_local.errors import InputError
from dflash_local.hub.repository import Repository
from dflash_local.pairs.address import read_address
from dflash_local.pairs.find import Files, UnconvertedDrafter, check_room, find_drafter, find_pair

LARGE = 1 << 60


def repository(name: str, sizes: dict[str, int]) -> Repository:
    return Repository(name, "0" * 40, sizes)


def test_the_disk_must_hold_all_of_it() -> None:
    small = Files(["a.gguf"], repository("lab/A", {"a.gguf": 1}))
    check_room(small, None)
    for model, drafter in (
        (Files(["a.gguf"], repository("lab/A", {"a.gguf": LARGE})), None),
        (small, Files(["d.gguf"], repository("lab/D", {"d.gguf": LARGE}))),
        (small, UnconvertedDrafter("lab/D", repository("lab/D", {"d.safetensors": LARGE}))),
    ):
        with pytest.raises(InputError, match=r"GiB are to be fetched, and .* make room, or set"):
            check_room(model, drafter)


def test_a_local_checkpoint_is_converted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    target = tmp_path / "target.gguf"
    found = find_drafter(str(tmp_path), read_address(tmp_path), Files([str(target)]))
    assert found == UnconvertedDrafter(str(tmp_path))


@pytest.mark.parametrize("stream", [None, object(), SimpleNamespace(isatty=lambda: False)])
def test_a_notebook_s_stderr_will_do(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert find_pair(*tiny_coder.pair(), say=str).target == tiny_coder.pair()[0]
