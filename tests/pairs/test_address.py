"""Addresses that a user writes for a model."""

from pathlib import Path

import pytest

from dflash_local.errors import FileError, InputError
from dflash_local.pairs import find
from dflash_local.pairs.address import HubAddress, NamedPair, read_address


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Qwen/Qwen3-8B-GGUF", HubAddress("Qwen/Qwen3-8B-GGUF")),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q8_0", HubAddress("Qwen/Qwen3-8B-GGUF", "Q8_0")),
        ("https://huggingface.co/a/b/", HubAddress("a/b")),
        ("https://huggingface.co/a/b/tree/main", HubAddress("a/b")),
        ("https://hf.co/a/b/blob/main/q/c.gguf", HubAddress("a/b", file="q/c.gguf")),
        (
            "https://huggingface.co/a/b/resolve/v1/c.gguf?download=true",
            HubAddress("a/b", file="c.gguf", revision="v1"),
        ),
    ],
)
def test_places_on_the_hub(given: str, expected: HubAddress) -> None:
    assert read_address(given) == expected


@pytest.mark.parametrize(
    ("given", "quant"), [("qwen3-8b", None), ("Qwen3:8B", None), ("qwen3:8b:Q8_0", "Q8_0")]
)
def test_names(given: str, quant: str | None) -> None:
    found = read_address(given)
    assert isinstance(found, NamedPair)
    assert (found.entry.name, found.quant) == ("qwen3-8b", quant)


def test_what_is_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    assert isinstance(read_address("qwen3-8b"), NamedPair), "nothing lies in that folder"
    (folder / "own.gguf").touch()
    assert read_address("qwen3-8b") == Path("qwen3-8b")


@pytest.mark.parametrize("given", ["gone.gguf", "./gone", "/no/such/file", Path("gone")])
def test_a_path_that_is_not_there(given: str | Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        read_address(given)


def test_what_is_nothing_at_all() -> None:
    with pytest.raises(InputError, match=r"no name of .*did you mean qwen3-8b"):
        read_address("qwen3-8")
    with pytest.raises(InputError, match="no file"):
        read_address("?")


def test_a_folder_without_models_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match="this folder holds no GGUF model"):
        read_address("empty")


def test_folders(tmp_path: Path) -> None:
    def found(**more: object) -> find.PairFiles:
        return find.find_pair(tmp_path, say=str)

    with pytest.raises(FileError, match="holds no GGUF model"):
        found()
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert found() == find.PairFiles(tmp_path / "model-Q4_K_M.gguf", None)
    for name in ("dflash-Q8_0.gguf", "dflash-BF16.gguf"):
        (tmp_path / name).touch()
    assert found().draft == tmp_path / "dflash-Q8_0.gguf"
    (tmp_path / "model-Q8_0.gguf").touch()
    with pytest.raises(FileError, match="holds 2 models: give the path of one"):
        found()
