"""A drafter that was written is tried in a child process: bad ones are refused, bad luck is not."""

from pathlib import Path

import pytest

import shipped_drafter
from dflash_local.convert import convert
from dflash_local.errors import FileError
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.trial.drafter import try_drafter
from gguf_files import ARRAY, STRING, UINT32, changed

Pair = tuple[Path, Path]

LOADS = "llama.cpp takes its keys, vocabulary and tensors"


@pytest.fixture(scope="module")
def spec(pair: Pair) -> DrafterSpec:
    return read_drafter(GgufFile.open(pair[1]))


def test_what_llama_cpp_dies_of_is_a_bad_file(
    pair: Pair, spec: DrafterSpec, tmp_path: Path
) -> None:
    tokens = GgufFile.open(pair[1]).metadata["tokenizer.ggml.tokens"]
    keys = {"tokenizer.ggml.tokens": ([*tokens[:-1], tokens[0]], ARRAY, STRING)}
    path = changed(pair[1], tmp_path / "d.gguf", keys=keys)
    with pytest.raises(FileError, match=r"the process died by SIGABRT, .*GGML_ASSERT") as caught:
        try_drafter(path, spec, None)
    assert str(caught.value).startswith(f"{path}: loading by llama.cpp failed: ")


def test_a_target_that_does_not_load_is_not_the_drafters_fault(pair: Pair, tmp_path: Path) -> None:
    keys = {"qwen3.attention.head_count": (3, UINT32, None)}
    target = changed(pair[0], tmp_path / "target.gguf", keys=keys)
    drafter = shipped_drafter.write(tmp_path / "drafter")
    found = convert(drafter, target=target, output=tmp_path / "d.gguf")
    assert found.checks[-1] == LOADS
    assert any(
        note.startswith("not tried in llama.cpp: loading the target: ") for note in found.notes
    )


def test_want_of_time_is_not_the_drafters_fault(pair: Pair, spec: DrafterSpec) -> None:
    tried = try_drafter(pair[1], spec, pair[0], limit_s=-60.0)
    assert tried.passed == ()
    assert "importing llama.cpp: stopped after" in tried.not_tried


def test_a_file_that_fails_its_checks_gets_no_name(pair: Pair, tmp_path: Path) -> None:
    """A pre-tokenizer that llama.cpp does not know, as a newer target may have."""
    target = changed(
        pair[0], tmp_path / "target.gguf", keys={"tokenizer.ggml.pre": ("nobodys", STRING, None)}
    )
    drafter = shipped_drafter.write(tmp_path / "drafter")
    output = tmp_path / "output"
    output.mkdir()
    with pytest.raises(FileError) as caught:
        convert(drafter, target=target, output=output / "d.gguf")
    message = str(caught.value)
    assert message.startswith(f"{output / 'd.gguf'}: loading by llama.cpp failed: ")
    assert "nobodys" in message and message.endswith("; the file was removed")
    assert list(output.iterdir()) == []
