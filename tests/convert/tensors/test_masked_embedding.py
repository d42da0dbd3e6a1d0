"""A drafter with a vector for the mask token takes the rest of its embeddings from the target."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from numpy.typing import NDArray

import shipped_drafter
import tiny_coder
from dflash_local import load
from dflash_local.convert import convert
from dflash_local.errors import FileError, InputError
from dflash_local.gguf.file import GgufFile
from hf_drafters import as_bfloat16

Pair = tuple[Path, Path]

PROMPT = tiny_coder.prompts()["code"][0]
MASK = 8191


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return shipped_drafter.write(tmp_path / "drafter")


def values(path: Path, name: str) -> NDArray[np.float32]:
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return quants.dequantize(tensor.data, tensor.tensor_type)


def bring(folder: Path, vector: NDArray[np.float32], token: int = MASK) -> None:
    saved = {"mask_token_id": token, "embedding": torch.from_numpy(vector)}
    torch.save(saved, folder / "mask_embedding.pt")


@pytest.mark.slow
def test_the_targets_own_vector_changes_nothing(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    bring(drafter, values(pair[0], "token_embd.weight")[MASK].copy())
    told: list[str] = []
    found = convert(drafter, target=pair[0], output=tmp_path / "d.gguf", say=told.append)
    assert "token_embd.weight: for mask_embedding.pt, from token_embd.weight" in told
    assert found.n_tensors == 36 + 2
    head = "output.weight" if "output.weight" in GgufFile.open(pair[0]).tensors else None
    for ours, theirs in (
        ("token_embd.weight", "token_embd.weight"),
        ("output.weight", head or "token_embd.weight"),
    ):
        assert np.array_equal(values(found.path, ours), values(pair[0], theirs))
    results = []
    for path in (pair[1], found.path):
        with load(
            pair[0], path, n_ctx=256, kv_type="q8_0", n_gpu_layers=0, n_threads=1, quiet=True
        ) as model:
            results.append(model.generate(PROMPT, max_tokens=48, draft_width=16))
    before, after = results
    assert after.tokens == before.tokens
    assert after.stats.accepted == before.stats.accepted > 0


@pytest.mark.slow
def test_one_row_is_replaced(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    vector = as_bfloat16(np.linspace(-1, 1, 512, dtype=np.float32))
    bring(drafter, vector)
    found = convert(drafter, target=pair[0], outtype="f32", output=tmp_path / "d.gguf")
    rows, theirs = values(found.path, "token_embd.weight"), values(pair[0], "token_embd.weight")
    assert np.array_equal(rows[MASK], vector)
    assert np.array_equal(np.delete(rows, MASK, 0), np.delete(theirs, MASK, 0))
    assert np.array_equal(values(found.path, "output.weight")[MASK], theirs[MASK])


def test_what_does_not_fit_is_said(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    def refusal(target: Path) -> str:
        with pytest.raises(InputError) as caught:
            convert(drafter, target=target, output=tmp_path / "d.gguf")
        assert not (tmp_path / "d.gguf").exists()
        return str(caught.value)

    bring(drafter, np.zeros(512, np.float32), token=7)
    assert "is for token 7, the drafter's mask token is 8191" in refusal(pair[0])
    bring(drafter, np.zeros(64, np.float32))
    assert "a vector of 64, expected hidden_size 512" in refusal(pair[0])


def test_a_file_that_shrinks_is_said(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "target.gguf"
    shutil.copy(pair[0], path)
    rows = GgufFile.open(path)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(FileError, match=r"target\.gguf: became shorter while it was read"):
        rows.rows("token_embd.weight", 8000, 8192)
