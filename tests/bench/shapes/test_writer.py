"""Models of random weights: they load and draft like real ones, and appear whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from dflash_local import load
from dflash_local.bench.shapes.catalogue import SHAPES, find_shape, write_pair
from dflash_local.bench.shapes.file import drafter_file, target_file
from dflash_local.bench.shapes.shape import DrafterShape, Experts, Shape
from dflash_local.bench.shapes.tensors import QUANTS
from dflash_local.bench.shapes.weights import RandomBlocks
from dflash_local.errors import InputError
from dflash_local.fit.pairing import check_pair
from dflash_local.gguf.file import GgufFile
from peak_memory import PEAK

DENSE = Shape(
    name="mini",
    architecture="qwen3",
    n_layer=6,
    n_embd=256,
    n_ff=512,
    n_head=4,
    n_head_kv=2,
    head_dim=64,
    n_vocab=600,
    drafter=DrafterShape(2, 512, 4, 2, 64),
    context_length=4096,
)
EXPERTS = replace(
    DENSE, name="mini-experts", architecture="qwen3moe", experts=Experts(8, 2, 256), tied=True
)
LLAMA = replace(DENSE, name="mini-llama", architecture="llama", pre_tokenizer="llama-bpe")
# rows that are no whole number of K-quant blocks, as in the real one
GPT_OSS = replace(
    DENSE,
    name="mini-oss",
    architecture="gpt-oss",
    n_embd=288,
    n_ff=288,
    experts=Experts(8, 2, 288),
    pre_tokenizer="gpt-4o",
)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", [DENSE, EXPERTS, LLAMA, GPT_OSS], ids=lambda shape: shape.name)
def test_a_pair_loads_and_drafts(shape: Shape, quant: str, tmp_path: Path) -> None:
    if quant == "MXFP4" and not shape.experts:
        with pytest.raises(InputError, match="for mixtures of experts"):
            write_pair(shape, quant, tmp_path)
        return
    drafter_quant = "Q8_0" if quant == "MXFP4" else quant
    pair = write_pair(shape, quant, tmp_path, drafter_quant=drafter_quant)
    with load(*pair, n_ctx=512, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        result = model.generate("def f(x):\n", max_tokens=12, draft_width=8)
    assert len(result.tokens) == 12
    assert result.stats.drafted > 0


def test_chats_have_a_template(tmp_path: Path) -> None:
    with load(*write_pair(DENSE, "Q8_0", tmp_path), n_ctx=512, n_threads=1, quiet=True) as model:
        result = model.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
    assert len(result.tokens) == 2


@pytest.mark.parametrize("name", SHAPES)
def test_a_real_shape_is_a_pair(name: str) -> None:
    """Headers alone: the weights of these are gigabytes."""
    shape = find_shape(name)
    quant = "MXFP4" if name == "gpt-oss-20b" else "Q4_K_M"
    target, drafter = target_file(shape, quant), drafter_file(shape, "Q8_0")
    keys = {key.name: key.value for key in (*target.keys, *drafter.keys)}
    assert len(keys["tokenizer.ggml.tokens"]) == shape.n_vocab
    assert len(set(keys["tokenizer.ggml.tokens"])) == shape.n_vocab
    assert keys["dflash.target_layers"] == list(shape.taps)
    assert len(shape.taps) == 5
    assert max(shape.taps) < shape.n_layer


@pytest.mark.parametrize(
    ("name", "quant", "gigabytes"),
    [  # of the files that llama.cpp's users download
        ("qwen3-8b", "Q4_K_M", 5.03),
        ("qwen3-8b", "Q8_0", 8.71),
        ("qwen3-4b", "Q4_K_M", 2.50),
        ("qwen3-30b-a3b", "Q4_K_M", 18.6),
        ("llama-3.1-8b", "Q4_K_M", 4.92),
        ("gpt-oss-20b", "MXFP4", 12.1),
    ],
)
def test_a_target_is_as_large_as_the_real_one(name: str, quant: str, gigabytes: float) -> None:
    tensors = target_file(find_shape(name), quant).tensors
    assert sum(tensor.n_bytes for tensor in tensors) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_taps_are_those_of_the_published_drafters() -> None:
    assert SHAPES["qwen3-8b"].taps == (2, 10, 18, 26, 34)
    assert SHAPES["qwen3-coder-30b-a3b"].taps == (2, 13, 24, 35, 46)


@pytest.mark.parametrize("n_layer", [3, 4, 12, 100])
def test_other_numbers_of_layers_make_a_pair_too(n_layer: int, tmp_path: Path) -> None:
    target, drafter = write_pair(DENSE, "Q8_0", tmp_path, n_layer=n_layer)
    assert target.name == f"mini-l{n_layer}-q8_0.gguf"
    spec = check_pair(GgufFile.open(target), GgufFile.open(drafter))
    assert max(spec.target_layers) < n_layer


@pytest.mark.parametrize("std", [0.01, 0.0625])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "BF16", "MXFP4", "F32"])
def test_values_are_small_and_finite(name: str, std: float) -> None:
    kind = Type[name]
    _, size = gguf.GGML_QUANT_SIZES[kind]
    pieces = RandomBlocks(std).take(kind, 4000 * size)
    raw = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    if name == "F32":
        values = raw.view(np.float32)
    else:
        values = gguf.quants.dequantize(raw.reshape(1000, -1), kind).reshape(-1)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=0.5)
    assert abs(values.mean()) < 0.2 * std
    assert abs(values).max() < 8 * std


def test_rows_differ(tmp_path: Path) -> None:
    target, _ = write_pair(replace(DENSE, n_vocab=5000), "Q4_K_M", tmp_path)
    for tensor in gguf.GGUFReader(target).tensors:
        if len(tensor.shape) == 2:
            rows = tensor.data.reshape(-1, tensor.data.shape[-1])
            assert len(np.unique(rows, axis=0)) == len(rows)


def test_the_same_call_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write_pair(DENSE, "Q4_K_M", tmp_path / "a")
    second = write_pair(DENSE, "Q4_K_M", tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_complete_file_is_kept_and_a_broken_one_written_anew(tmp_path: Path) -> None:
    target, drafter = write_pair(DENSE, "Q8_0", tmp_path)
    whole = target.read_bytes()
    marked = os.stat(drafter).st_mtime_ns
    target.write_bytes(whole[:-1])
    told: list[tuple[int, int]] = []
    write_pair(DENSE, "Q8_0", tmp_path, progress=lambda *said: told.append(said))
    assert target.read_bytes() == whole
    assert os.stat(drafter).st_mtime_ns == marked
    n_weights = sum(tensor.n_bytes for tensor in target_file(DENSE, "Q8_0").tensors)
    assert told[-1] == (n_weights, n_weights)

    again = os.stat(target).st_mtime_ns
    write_pair(DENSE, "Q8_0", tmp_path, progress=lambda *said: told.append(said))
    assert os.stat(target).st_mtime_ns == again
    assert sorted(path.name for path in tmp_path.iterdir()) == [drafter.name, target.name]


def test_names_of_quantisations_are_taken_in_any_case(tmp_path: Path) -> None:
    assert write_pair(DENSE, "q8_0", tmp_path) == write_pair(DENSE, "Q8_0", tmp_path)


def test_a_file_of_another_shape_under_that_name_is_replaced(tmp_path: Path) -> None:
    target, _ = write_pair(DENSE, "Q8_0", tmp_path)
    write_pair(replace(DENSE, rope_base=2e6), "Q8_0", tmp_path)
    assert GgufFile.open(target).metadata["qwen3.rope.freq_base"] == 2e6


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs \d.*GiB for .*-l512-bf16.gguf and .*are free"):
        write_pair("qwen3-coder-30b-a3b", "BF16", tmp_path, n_layer=512)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen9", "Q8_0"), "no shape 'qwen9'; expected one of qwen3-8b, "),
        (("qwen3-8b", "Q3_X"), "no quantisation 'Q3_X' for shapes; expected one of Q4_K_M, "),
        (("qwen3-8b", "MXFP4"), "qwen3-8b is none"),
    ],
)
def test_unknown_names_are_refused(
    arguments: tuple[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        write_pair(*arguments, tmp_path)


@pytest.mark.parametrize("n_layer", [0, 2, 513, -1])
def test_a_number_of_layers_that_nothing_runs_is_refused(n_layer: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected 3 to 512"):
        write_pair(DENSE, "Q8_0", tmp_path, n_layer=n_layer)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        write_pair(DENSE, "Q8_0", tmp_path / "file")


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from dflash_local.bench.shapes.catalogue import *;"
        "write_pair('qwen3-4b', 'Q8_0', Path(sys.argv[1]), n_layer=3,"
        " progress=lambda done, total: (print(done, flush=True), time.sleep(60)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        assert list(tmp_path.iterdir()) != []
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


WRITE = f"""{PEAK}
from dflash_local.bench.shapes.catalogue import write_pair
write_pair("qwen3-4b", "Q4_K_M", Path(sys.argv[1]), n_layer=3)
print(peak())
"""


def test_writing_takes_little_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(tmp_path)],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert 20e6 < int(done.stdout) < 200e6
