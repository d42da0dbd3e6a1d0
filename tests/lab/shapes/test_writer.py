"""Pairs of random weights load and draft like real ones, and appear whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_local import load
from dflash_local.errors import InputError
from dflash_local.fit.pairing import check_pair
from dflash_local.gguf.file import GgufFile
from gap_rule import first_difference, top_two_gap
from lab.shapes.file import target_file
from lab.shapes.shape import PairShape
from lab.shapes.tensors import QUANTS
from lab.shapes.writer import write_pair
from mini_shapes import DENSE, EVERY, EXPERTS, HYBRID, HYBRID_EXPERTS, SHORT_CONV

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [HYBRID, HYBRID_EXPERTS, SHORT_CONV], ids=lambda shape: shape.name
)
def test_a_hybrid_pair_drafts_what_plain_decoding_gives(shape: PairShape, tmp_path: Path) -> None:
    # Of K-quants, rows round differently in passes of other widths on some CPUs.
    files = write_pair(shape, "Q8_0", tmp_path, n_layer=5)
    options = {"n_ctx": 512, "n_gpu_layers": 0, "n_threads": 1, "kv_type": "q8_0", "quiet": True}
    wanted = {"max_tokens": 48, "logprobs": 2}
    with load(*files, draft_width=8, **options) as model, load(files[0], **options) as target:
        drafted = model.generate("def f(x):\n", **wanted)
        plain = target.generate("def f(x):\n", **wanted)
    assert drafted.stats.drafted > 0
    assert all(np.isfinite(entry.logprob) for entry in plain.logprobs)
    at = first_difference(plain.tokens, drafted.tokens)
    if shape.experts and at is not None:
        # A router in F32 rounds otherwise in a pass of more rows, which shifts all that follows.
        assert top_two_gap(plain.logprobs[at]) < 0.05
    else:
        assert at is None


CASES = [(shape, "Q4_K_M") for shape in EVERY]
CASES += [(shape, quant) for shape in (DENSE, EXPERTS) for quant in QUANTS if quant != "Q4_K_M"]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "quant"), CASES)
def test_every_pair_loads_and_drafts(shape: PairShape, quant: str, tmp_path: Path) -> None:
    if quant == "MXFP4" and not shape.experts:
        with pytest.raises(InputError, match="for mixtures of experts"):
            write_pair(shape, quant, tmp_path)
        return
    options = {"n_ctx": 512, "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    with load(*write_pair(shape, quant, tmp_path), draft_width=8, **options) as model:
        result = model.generate("def f(x):\n", max_tokens=12)
        asked = [{"role": "user", "content": "Hi"}]
        chat = model.chat(asked, max_tokens=2, ignore_eos=True)  # random weights may end it
    assert len(result.tokens) == 12
    assert result.stats.drafted > 0
    assert len(chat.tokens) == 2


@pytest.mark.parametrize("n_layer", [3, 12])
def test_other_numbers_of_layers_make_a_pair_too(n_layer: int, tmp_path: Path) -> None:
    target, drafter = write_pair(DENSE, "Q8_0", tmp_path, n_layer=n_layer)
    assert target.name == f"mini-l{n_layer}-q8_0.gguf"
    spec = check_pair(GgufFile.open(target), GgufFile.open(drafter))
    assert max(spec.target_layers) < n_layer


def test_the_same_call_gives_the_same_bytes(tmp_path: Path) -> None:
    first = write_pair(DENSE, "Q4_0", tmp_path / "a")
    second = write_pair(DENSE, "Q4_0", tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_complete_file_is_kept_and_a_broken_one_replaced(tmp_path: Path) -> None:
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


def test_a_file_of_another_shape_under_that_name_is_replaced(tmp_path: Path) -> None:
    target, _ = write_pair(DENSE, "Q8_0", tmp_path)
    write_pair(replace(DENSE, rope_base=2e6), "Q8_0", tmp_path)
    assert GgufFile.open(target).metadata["qwen3.rope.freq_base"] == 2e6


@pytest.mark.slow
def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs \d.*GiB for .*-l512-bf16.gguf and .*are free"):
        write_pair("qwen3-coder-30b-a3b", "BF16", tmp_path, n_layer=512)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from lab.shapes.writer import write_pair;"
        "write_pair('qwen3-4b', 'Q8_0', Path(sys.argv[1]), n_layer=3,"
        " progress=lambda done, total: (print(done, flush=True), time.sleep(60)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        assert list(tmp_path.iterdir()) != []
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []
