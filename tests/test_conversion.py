"""A published drafter becomes a file that works: with the target, here and in llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

import hf_drafters
import shipped_drafter
from dflash_local import Model, demo, load
from dflash_local.convert import convert
from dflash_local.gguf_file import GgufFile

Pair = tuple[Path, Path]

PROMPT = demo.prompts()["code"][0]
# sinks, reduced vocabularies, causal blocks, values made from keys, and the other two families
IN_LLAMA_CPP = {
    "swa-sinks", "scales", "reduced", "dflash2", "dspark", "dspark-interleaved", "dspark-sinks",
    "speculators", "gemma4",
}  # fmt: skip
# sizes of the shipped target
SIZES: dict[str, Any] = {"n_embd": 512, "n_vocab": 8192}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shipped_drafter.write(tmp_path_factory.mktemp("hf") / "Tiny-Coder-DFlash-b16")


@pytest.fixture(scope="module")
def plain_tokens(pair: Pair) -> Iterator[list[int]]:
    """What the target writes by itself."""
    with load(pair[0], n_ctx=256, kv_type="q8_0", n_gpu_layers=0, quiet=True) as model:
        yield model.generate(PROMPT, max_tokens=16).tokens


def opened(target: Path, drafter: Path) -> Model:
    return load(target, drafter, n_ctx=256, kv_type="q8_0", n_gpu_layers=0, quiet=True)


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    """Type and bytes of every tensor."""
    tensors = gguf.GGUFReader(path).tensors
    return {tensor.name: (int(tensor.tensor_type), tensor.data.tobytes()) for tensor in tensors}


def values(path: Path) -> dict[str, np.ndarray]:
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: quants.dequantize(t.data, t.tensor_type) for t in tensors}


def provenance(file: GgufFile) -> dict[str, Any]:
    names = ("dflash_local.", "general.source.", "general.base_model.", "general.license")
    return {key: value for key, value in file.metadata.items() if key.startswith(names)}


def test_the_shipped_drafter_comes_out_as_it_was(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    target, shipped = pair
    found = convert(drafter, target=target, output=tmp_path / "d.gguf")
    assert contents(found.path) == contents(shipped)
    before, after = GgufFile.open(shipped), GgufFile.open(found.path)
    ours = ("dflash_local.", "general.base_model.", "general.name", "general.size_label")
    keys = (before.metadata.keys() | after.metadata.keys()) - {
        key for key in (*before.metadata, *after.metadata) if key.startswith(ours)
    }
    assert len(keys) > 20
    for key in keys:
        assert after.get(key) == before.get(key), key
        assert after.value_types.get(key) == before.value_types.get(key), key
    assert found.n_bytes == found.path.stat().st_size
    assert (found.family, found.runs_on, found.outtype) == ("dflash", "fused", "q8_0")
    assert (found.n_tensors, found.block_size, found.target_layers) == (36, 16, (2, 4, 6))
    assert (found.left_out, found.notes) == ({}, [])
    assert found.checks == [
        f"fits the target {target.name}",
        "keys, tensors and shapes read back",
        "the fused graph drafts a block",
        "llama.cpp drafts a block",
    ]
    assert json.loads(json.dumps(found.as_dict()))["path"] == str(found.path)


def test_it_drafts_as_the_shipped_one(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    found = convert(drafter, target=pair[0], output=tmp_path / "d.gguf")
    results = []
    for path in (pair[1], found.path):
        with opened(pair[0], path) as model:
            results.append(model.generate(PROMPT, max_tokens=48))
    before, after = results
    assert after.tokens == before.tokens
    assert after.stats.accepted == before.stats.accepted > 0
    assert after.stats.drafted == before.stats.drafted


@pytest.mark.parametrize("outtype", ["bf16", "f16", "f32", "q4_k_m", "q4_0"])
def test_every_kind_of_file_drafts(
    outtype: str, pair: Pair, drafter: Path, plain_tokens: list[int], tmp_path: Path
) -> None:
    found = convert(drafter, target=pair[0], outtype=outtype, output=tmp_path / "d.gguf")
    assert "llama.cpp drafts a block" in found.checks
    before, after = values(pair[1]), values(found.path)
    assert before.keys() == after.keys()
    for name in before:
        error = np.abs(after[name].ravel() - before[name].ravel()).max()
        coarse = 0.15 if outtype.startswith("q") else 0.004
        assert error <= coarse * np.abs(before[name]).max(), name
    if outtype == "f32":
        assert all(np.array_equal(after[name].ravel(), before[name].ravel()) for name in before)
    with opened(pair[0], found.path) as model:
        assert model.generate(PROMPT, max_tokens=16).tokens == plain_tokens


@pytest.mark.parametrize("name", [name for name in hf_drafters.VARIANTS if name != "mrope"])
def test_every_published_layout_drafts(
    name: str, pair: Pair, plain_tokens: list[int], tmp_path: Path
) -> None:
    folder = hf_drafters.write(tmp_path / name, name, **SIZES)
    found = convert(folder, target=pair[0], output=tmp_path / "d.gguf")
    assert found.runs_on == ("llama.cpp" if name in IN_LLAMA_CPP else "fused")
    # the one layout that llama.cpp does not load
    assert ("llama.cpp drafts a block" in found.checks) == (name != "gpt-oss")
    assert ("the fused graph drafts a block" in found.checks) == (found.runs_on == "fused")
    with opened(pair[0], found.path) as model:
        result = model.generate(PROMPT, max_tokens=16)
    assert result.tokens == plain_tokens
    assert result.stats.drafted > 0
