"""A published drafter becomes a file that works: with the target, here and in llama.cpp."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants

import dflash_local
import hf_drafters
import shipped_drafter
import tiny_coder
from dflash_local import Model, load
from dflash_local.convert import convert
from dflash_local.fit import architectures
from dflash_local.gguf.file import GgufFile
from gguf_files import ARRAY, INT32, STRING, Value, changed, parts, tensors_of

Pair = tuple[Path, Path]

PROMPT = tiny_coder.prompts()["code"][0]
# sizes of the tiny target
SIZES: dict[str, Any] = {"n_embd": 512, "n_vocab": 8192}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shipped_drafter.write(tmp_path_factory.mktemp("hf") / "Tiny-Coder-DFlash-b16")


@pytest.fixture(scope="module")
def plain_tokens(pair: Pair) -> Iterator[list[int]]:
    """The target's own text."""
    with load(pair[0], n_ctx=256, kv_type="q8_0", n_gpu_layers=0, n_threads=1, quiet=True) as model:
        yield model.generate(PROMPT, max_tokens=16).tokens


def opened(target: Path, drafter: Path) -> Model:
    return load(target, drafter, n_ctx=256, kv_type="q8_0", n_gpu_layers=0, n_threads=1, quiet=True)


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    """Type and bytes of every tensor."""
    return {name: (int(kind), data.tobytes()) for name, (data, kind) in tensors_of(path).items()}


def values(path: Path) -> dict[str, np.ndarray]:
    return {name: quants.dequantize(*tensor) for name, tensor in tensors_of(path).items()}


def provenance(file: GgufFile) -> dict[str, Any]:
    names = ("dflash_local.", "general.source.", "general.base_model.", "general.license")
    return {key: value for key, value in file.metadata.items() if key.startswith(names)}


@pytest.mark.slow
def test_the_shipped_drafter_comes_out_as_it_was(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    target, shipped = pair
    found = convert(drafter, target=target, output=tmp_path / "d.gguf")
    assert contents(found.path) == contents(pair[1])
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
    assert (found.family, found.outtype) == ("dflash", "q8_0")
    assert (found.n_tensors, found.block_size, found.target_layers) == (36, 16, (2, 4, 6))
    assert (found.left_out, found.notes) == ({}, [])
    assert found.checks == [
        f"fits the target {target.name}",
        "keys, tensors and shapes read back",
        "llama.cpp takes its keys, vocabulary and tensors",
        "the fused graph drafts a block",
    ]
    assert json.loads(json.dumps(found.as_dict()))["path"] == str(found.path)


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "outtype",
    ["f16", "q4_k_m", *(pytest.param(t, marks=pytest.mark.slow) for t in ("bf16", "f32", "q4_0"))],
)
def test_every_kind_of_file_drafts(
    outtype: str, pair: Pair, drafter: Path, plain_tokens: list[int], tmp_path: Path
) -> None:
    found = convert(drafter, target=pair[0], outtype=outtype, output=tmp_path / "d.gguf")
    assert "llama.cpp takes its keys, vocabulary and tensors" in found.checks
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in hf_drafters.VARIANTS if n != "mrope"])
def test_every_published_layout_drafts(
    name: str, pair: Pair, plain_tokens: list[int], tmp_path: Path
) -> None:
    folder = hf_drafters.write(tmp_path / name, name, **SIZES)
    found = convert(folder, target=pair[0], output=tmp_path / "d.gguf")
    # the one layout that llama.cpp does not load
    assert ("llama.cpp takes its keys, vocabulary and tensors" in found.checks) == (
        name != "gpt-oss"
    )
    assert "the fused graph drafts a block" in found.checks
    with opened(pair[0], found.path) as model:
        result = model.generate(PROMPT, max_tokens=16, draft_width=model.engine.max_width)
    assert result.tokens == plain_tokens
    assert result.stats.drafted > 0


@pytest.mark.slow
def test_a_reduced_vocabulary_is_mapped_to_tokens(pair: Pair, tmp_path: Path) -> None:
    folder = hf_drafters.write(tmp_path / "drafter", "reduced", **SIZES)
    found = convert(folder, target=pair[0], output=tmp_path / "d.gguf")
    offsets = hf_drafters.weights("reduced", **SIZES)["d2t"]
    stored = next(t for t in gguf.GGUFReader(found.path).tensors if t.name == "d2t")
    assert stored.data.tolist() == (offsets + np.arange(len(offsets))).tolist()
    assert found.left_out == {"t2d": "the reverse of d2t"}


@pytest.mark.slow
def test_a_target_that_is_not_drafted_for_here_is_no_obstacle(
    pair: Pair, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every architecture that takes the tiny target's tensors is tapped by now: as before that.
    tapped = architectures.TAPPED_ARCHITECTURES - {"qwen3vl"}
    monkeypatch.setattr(architectures, "TAPPED_ARCHITECTURES", tapped)
    keys, _ = parts(pair[0])
    changes: dict[str, Value | None] = {"general.architecture": ("qwen3vl", STRING, None)}
    for name, value in keys.items():
        if name.startswith("qwen3."):
            changes |= {name: None, name.replace("qwen3.", "qwen3vl."): value}
    changes["qwen3vl.rope.dimension_sections"] = ([24, 20, 20, 0], ARRAY, INT32)
    target = changed(pair[0], tmp_path / "target.gguf", keys=changes)
    found = convert(drafter, target=target, output=tmp_path / "d.gguf")
    assert contents(found.path) == contents(pair[1])
    assert GgufFile.open(found.path).get("dflash.rope.dimension_sections") == [32, 0, 0, 0]
    assert "llama.cpp takes its keys, vocabulary and tensors" in found.checks
    assert found.notes == ["dflash-local cannot draft for this target: 'qwen3vl' offers no taps"]


def test_the_file_says_where_it_comes_from(pair: Pair, drafter: Path, tmp_path: Path) -> None:
    card = "---\nlicense: apache-2.0\n---\n"
    (tmp_path / "Drafter").mkdir()
    for file in drafter.iterdir():
        os.link(file, tmp_path / "Drafter" / file.name)
    (tmp_path / "Drafter" / "README.md").write_text(card)
    found = convert(tmp_path / "Drafter", target=pair[0], output=tmp_path / "d.gguf")
    digest = hashlib.sha256((drafter / "model.safetensors").read_bytes()).hexdigest()
    name = GgufFile.open(pair[0]).get("general.name")
    assert provenance(GgufFile.open(found.path)) == {
        "dflash_local.source": "Drafter",
        "dflash_local.source.sha256": digest,
        "dflash_local.version": dflash_local.__version__,
        "dflash_local.target": name,
        "general.license": "apache-2.0",
        "general.base_model.count": 1,
        "general.base_model.0.name": name,
    }
    assert (found.source, found.revision, found.sha256) == ("Drafter", None, digest)
    assert str(tmp_path).encode() not in found.path.read_bytes()


def test_a_dry_run_writes_nothing(
    pair: Pair, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned = convert(drafter, target=pair[0], outtype="bf16", dry_run=True)
    assert os.listdir(tmp_path) == []
    assert planned.path == Path("tiny-coder-dflash-b16-bf16.gguf")
    assert planned.sha256 is None
    written = convert(drafter, target=pair[0], outtype="bf16")
    assert os.listdir(tmp_path) == [str(planned.path)]
    for name in ("path", "n_tensors", "left_out", "target_layers", "notes"):
        assert getattr(written, name) == getattr(planned, name)
    assert 0 < written.n_bytes - planned.n_bytes < 1 << 20  # the metadata
    assert planned.checks == written.checks[:1]


def test_what_happens_is_told_and_happens_again(pair: Pair, tmp_path: Path) -> None:
    folder = hf_drafters.write(tmp_path / "drafter", "speculators", **SIZES)
    told: list[str] = []
    steps: list[tuple[int, int]] = []
    first = convert(
        folder,
        target=pair[0],
        outtype="q4_k_m",
        output=tmp_path / "1.gguf",
        say=told.append,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert "left out: t2d (the reverse of d2t)" in told
    done = [done for done, _ in steps]
    assert done == sorted(done)
    assert steps[-1][0] == steps[-1][1] > 0
    again = convert(folder, target=pair[0], outtype="q4_k_m", output=tmp_path / "2.gguf")
    assert first.path.read_bytes() == again.path.read_bytes()
    assert first.sha256 == again.sha256
