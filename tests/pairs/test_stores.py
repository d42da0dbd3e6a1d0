"""Models of ollama and LM Studio, found where they lie."""

import json
from pathlib import Path

import pytest

import tiny_coder
from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from dflash_local.pairs.address import read_address
from dflash_local.pairs.find import find_pair
from dflash_local.pairs.inventory import remove
from dflash_local.pairs.stores import stored_models


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a model of each program, and what is no model."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    ollama = tmp_path / ".ollama/models"
    library = ollama / "manifests/registry.ollama.ai/library"
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:12ab"}
    for name, text in (
        ("tiny/latest", json.dumps({"layers": [{"mediaType": "x", "digest": "y"}, layer]})),
        ("broken/latest", "{"),
        ("gone/1b", json.dumps({"layers": [{**layer, "digest": "sha256:none"}]})),
        ("../someone/own/8b", json.dumps({"layers": [layer]})),
        ("sly/1b", json.dumps({"layers": [{**layer, "digest": "../../../secret"}]})),
    ):
        path = library / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    blobs = ollama / "blobs"
    blobs.mkdir()
    (blobs / "sha256-12ab").symlink_to(tiny_coder.pair()[0])
    (tmp_path / "secret").write_text("secret")
    studio = tmp_path / ".lmstudio/models/lab/Tiny-GGUF"
    studio.mkdir(parents=True)
    (studio / "Tiny-Q8_0.gguf").symlink_to(tiny_coder.pair()[0])
    (studio / "mmproj-Tiny.gguf").symlink_to(tiny_coder.pair()[0])
    return tmp_path


def test_models_of_other_programs_are_found_by_their_names(home: Path) -> None:
    found = [(each.name, each.store) for each in stored_models()]
    assert found == [
        ("someone/own:8b", "ollama"),
        ("Tiny-Q8_0", "LM Studio"),
        ("tiny:latest", "ollama"),
    ]
    blob = home / ".ollama/models/blobs/sha256-12ab"
    for name in ("tiny", "tiny:latest", "someone/own:8b"):
        assert read_address(name) == blob
    assert find_pair("Tiny-Q8_0", say=str).target.name == "Tiny-Q8_0.gguf"


def test_names_of_ours_come_first(home: Path) -> None:
    qwen = home / ".lmstudio/models/qwen3-8b.gguf"
    qwen.symlink_to(tiny_coder.pair()[0])
    assert str(read_address("qwen3-8b")) == "qwen3-8b"


@pytest.mark.usefixtures("home")
def test_a_name_with_a_slip_is_told_the_near_one() -> None:
    with pytest.raises(InputError, match=r"did you mean Tiny-Q8_0"):
        read_address("tiny-q8")


@pytest.mark.usefixtures("home")
def test_what_another_program_keeps_is_removed_there() -> None:
    with pytest.raises(InputError, match=r"this model is ollama's: remove it there"):
        remove(read_address("tiny"))


def test_a_file_that_is_named_by_its_sum_is_called_what_its_model_is(home: Path) -> None:
    blob = home / ".ollama/models/blobs/sha256-12ab"
    assert GgufFile.open(blob).name == GgufFile.open(tiny_coder.pair()[0]).get("general.name")
    assert GgufFile.open(tiny_coder.pair()[0]).name == tiny_coder.pair()[0].name
