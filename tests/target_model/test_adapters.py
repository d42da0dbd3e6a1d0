"""LoRA adapters and control vectors: their effects, for whom, and the files that are refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import mini_pair
from adapters import ADAPTED, F32, merged, write_control_vector, write_lora
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.engine.sequence import Sequence
from dflash_local.errors import FileError
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.plan import make_plan
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import runtime
from dflash_local.sampling.params import SamplingParams
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from gguf_files import ARRAY, STRING, UINT32
from pair_engine import fused_drafter
from synthetic import write_target

TOKENS = list(range(40, 60))
I32 = gguf.GGMLQuantizationType.I32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("targets") / "target.gguf", n_layer=3)


def opened(path: Path, **options: Any) -> Target:
    return Target(path, TargetOptions(n_ctx=256, n_threads=1, **options))


def logits(target: Target) -> NDArray[np.float32]:
    n = len(TOKENS)
    target.clear(0)
    target.decode(TOKENS, range(n), [0] * n, [True] * n)
    return np.stack([target.logits(row) for row in range(n)])


@pytest.mark.parametrize("scale", [1.0, 0.25, -0.5])
def test_an_adapter_changes_the_weights(path: Path, tmp_path: Path, scale: float) -> None:
    lora = write_lora(tmp_path / "lora.gguf", path)
    with opened(path) as base, opened(merged(tmp_path / "merged.gguf", path, scale)) as expected:
        plain, changed = logits(base), logits(expected)
    assert np.abs(plain - changed).max() > 0.5
    with opened(path, lora=[f"{lora}:{scale}"]) as adapted:
        np.testing.assert_allclose(logits(adapted), changed, atol=2e-3)
        adapted.adapt([0.0])
        assert (logits(adapted) == plain).all()
        adapted.adapt([scale])
        adapted.reopen(adapted.options)
        np.testing.assert_allclose(logits(adapted), changed, atol=2e-3)


def test_the_embeddings_can_be_adapted(path: Path, tmp_path: Path) -> None:
    """Rows of A are looked up there, and B is the way from them to a state. Of a head that is the
    embeddings llama.cpp makes an abort."""
    free = write_target(tmp_path / "free.gguf", tied=False)
    n_embd, n_vocab = GgufFile.open(free).tensors["token_embd.weight"].shape
    a, b = np.ones((n_vocab, 2), np.float32), np.ones((n_embd, 2), np.float32)
    tensors = {"token_embd.weight.lora_a": (a, F32), "token_embd.weight.lora_b": (b, F32)}
    lora = write_lora(tmp_path / "lora.gguf", free, names=(), tensors=tensors)
    with opened(free) as base, opened(free, lora=[lora]) as adapted:
        assert np.abs(logits(base) - logits(adapted)).max() > 0.1
    with pytest.raises(FileError, match="is the target's head, too"):
        opened(path, lora=[lora])


def test_two_adapters_act_together(path: Path, tmp_path: Path) -> None:
    loras = [write_lora(tmp_path / f"{seed}.gguf", path, seed=seed) for seed in (1, 2)]
    with opened(path, lora=loras) as both:
        together = logits(both)
        for scales in ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0]):
            both.adapt(scales)
            assert np.abs(logits(both) - together).max() > 0.1


def test_a_control_vector_is_added_after_its_layer(path: Path, tmp_path: Path) -> None:
    vector = np.linspace(-2, 2, 64, dtype=np.float32)
    file = write_control_vector(tmp_path / "vector.gguf", {1: vector})
    states = []
    for given in ([], [f"{file}:0.5"], [(file, 0.25), (file, 0.25)]):
        with opened(path, control_vectors=given, tapped_layers=(1, 2)) as target:
            logits(target)
            states.append(target.hidden_states().reshape(len(TOKENS), 2, 64))
    base, *steered = states
    for each in steered:
        assert (each[:, 0] == base[:, 0]).all()
        np.testing.assert_allclose(each[:, 1], base[:, 1] + 0.5 * vector, atol=1e-6)


def key(name: str, *value: Any) -> dict[str, Any]:
    return {"keys": {name: (*value, None)[:3]}}


def part(*shape: int, dtype: Any = np.float32, kind: Any = F32) -> dict[str, Any]:
    """An adapter whose first part A has this shape."""
    return {"tensors": {f"{ADAPTED[0]}.lora_a": (np.ones(shape, dtype), kind)}}


ELSEWHERE = {f"blk.9.x.lora_{x}": (np.ones((4, 4), np.float32), F32) for x in "ab"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a model": (key("general.type", "model", STRING), "no LoRA adapter"),
    "another kind": (key("adapter.type", "ia3", STRING), "no LoRA adapter"),
    "a number": (key("general.type", 1, UINT32), "no LoRA adapter"),
    "for others": (key("general.architecture", "llama", STRING), "for llama .* target is qwen3"),
    "whole alpha": (key("adapter.lora.alpha", 8, UINT32), "is no float32"),
    "activated": (key("adapter.alora.invocation_tokens", [1], ARRAY, UINT32), "activated LoRA"),
    "nothing": ({"names": ()}, "adapts no tensor"),
    "half": ({"tensors": {f"{ADAPTED[0]}.lora_b": None}}, "only one of"),
    "strange": ({"tensors": {"blk.0.x": (np.ones(4, np.float32), F32)}}, "no part of a LoRA"),
    "unknown": ({"tensors": ELSEWHERE}, "no tensor 'blk.9.x'"),
    "narrow": (part(4, 32), r"parts of \[32, 4\] and \[4, 64\], and the target's is \[64, 64\]"),
    "other ranks": (part(2, 64), "has parts of"),
    "deep": (part(3, 4, 64), "has parts of"),
    "whole numbers": (part(4, 64, dtype=np.int32, kind=I32), "is I32"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_adapter_that_does_not_fit_is_refused(path: Path, tmp_path: Path, name: str) -> None:
    changes, said = BAD[name]
    lora = write_lora(tmp_path / "lora.gguf", path, **changes)
    with pytest.raises(FileError, match=said):
        opened(path, lora=[lora])


@pytest.mark.parametrize(
    "layer, shape, said",
    [(0, 64, "expected direction.LAYER"), (1, 32, "expected"), (3, 64, "layers 0 to 2")],
)
def test_a_control_vector_that_does_not_fit_is_refused(
    path: Path, tmp_path: Path, layer: int, shape: int, said: str
) -> None:
    file = write_control_vector(tmp_path / "v.gguf", {layer: np.ones(shape, np.float32)})
    with pytest.raises(FileError, match=said):
        opened(path, control_vectors=[file])
    whole = write_control_vector(tmp_path / "w.gguf", {1: np.ones(64, np.float32)})
    empty = write_control_vector(tmp_path / "e.gguf", {})
    with pytest.raises(FileError, match=r"e\.gguf: no control vector"):
        opened(path, control_vectors=[whole, empty])


def test_the_plan_counts_adapters(path: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora.gguf", path)
    target, devices = GgufFile.open(path), runtime.devices()
    n_bytes = sum(tensor.n_bytes for tensor in GgufFile.open(lora).tensors.values())
    with_it, without = (
        make_plan(target, None, None, LoadOptions(lora=given, n_gpu_layers=0), devices)
        for given in ([lora], [])
    )
    assert with_it.target_bytes - without.target_bytes == n_bytes


# Requests

PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 4 + "def add_all(numbers):\n"


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strong enough to change what the mini target says, not so strong that it says nothing."""
    return write_lora(tmp_path_factory.mktemp("lora") / "lora.gguf", mini_pair.pair()[0], gain=0.02)


def engine_with(lora: Path, n_seq: int = 1) -> Engine:
    options = TargetOptions(
        n_ctx=1024, n_seq=n_seq, n_threads=1, kv_type="q8_0", tapped_layers=(1,), lora=[lora]
    )
    target = Target(mini_pair.pair()[0], options)
    return Engine(target, fused_drafter(target), n_seq=n_seq)


def begun(engine: Engine, width: int, scale: float | None, **params: Any) -> Sequence:
    prompt = engine.target.vocabulary.tokenize(PROMPT)
    scales = None if scale is None else (scale,)
    return engine.begin(Request(prompt, SamplingParams(**params), 40, width, lora=scales))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}])
def test_drafted_answers_are_plain_ones(lora: Path, params: dict[str, Any]) -> None:
    """One after the other, then all at once; and the same prompt at another scale uses nothing that
    was computed at the first."""
    scales, plain = (1.0, 0.0, None, 0.5), []
    engine = engine_with(lora, 4)
    with engine.target:
        for scale in scales:
            sequence = begun(engine, 0, scale, **params)
            assert (sequence.stats.cached_tokens > 0) == (scale is None)
            engine.run([sequence])
            plain.append(sequence.tokens)
        assert plain[0] == plain[2]
        assert len({tuple(tokens) for tokens in plain}) > 1
        engine.forget()
        drafted = [begun(engine, 8, scale, **params) for scale in scales]
        engine.run(drafted)
        assert [each.tokens for each in drafted] == plain
        assert sum(each.stats.accepted for each in drafted) > 0
