"""A drafter runs with the target that it was made for; every other pairing is one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_local import demo
from dflash_local.errors import FileError, InputError, PairError
from dflash_local.fit.pairing import (
    RECURRENT_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
    DrafterSpec,
    check_pair,
    check_taps,
    check_target,
)
from dflash_local.gguf.file import GgufFile
from gguf_files import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Tensor, Value, changed, parts

Keys = dict[str, Value | None]
F32 = gguf.GGMLQuantizationType.F32
TARGET, DRAFTER = demo.pair()


def drafter(tmp_path: Path, keys: Keys | None = None, tensors=None) -> GgufFile:
    return GgufFile.open(changed(DRAFTER, tmp_path / "drafter.gguf", keys=keys, tensors=tensors))


def target(tmp_path: Path, keys: Keys | None = None, tensors=None) -> GgufFile:
    return GgufFile.open(changed(TARGET, tmp_path / "target.gguf", keys=keys, tensors=tensors))


def of_architecture(tmp_path: Path, name: str) -> GgufFile:
    """The shipped target's file under another architecture's name."""
    keys, _ = parts(TARGET)
    renamed: Keys = {
        key.replace("qwen3.", f"{name}.", 1): value
        for key, value in keys.items()
        if key.startswith("qwen3.")
    }
    return target(tmp_path, {**renamed, "general.architecture": (name, STRING, None)})


def test_the_shipped_pair_fits() -> None:
    spec = check_pair(GgufFile.open(TARGET), GgufFile.open(DRAFTER))
    assert (spec.block_size, spec.target_layers, spec.n_taps) == (16, (2, 4, 6), 3)
    assert (spec.n_embd, spec.n_layer, spec.n_head, spec.n_head_kv) == (512, 3, 8, 2)
    assert (spec.head_dim, spec.n_ff, spec.n_vocab, spec.mask_token_id) == (64, 1536, 8192, 8191)
    assert (spec.sliding_window, spec.sliding_layers) == (0, (False, False, False))
    assert (spec.rope.freq_base, spec.rope.n_dims, spec.rope.scaling) == (1e6, 64, "none")
    assert spec.scales.rms_eps == pytest.approx(1e-6)
    assert spec.context_length == 4096


def test_optional_keys_are_read(tmp_path: Path) -> None:
    keys: Keys = {
        "dflash.attention.sliding_window": (128, UINT32, None),
        "dflash.attention.sliding_window_pattern": ([True, True, False], ARRAY, BOOL),
        "dflash.rope.scaling.type": ("yarn", STRING, None),
        "dflash.rope.scaling.factor": (4.0, FLOAT32, None),
        "dflash.rope.scaling.original_context_length": (1024, UINT32, None),
        "dflash.rope.dimension_count": (32, UINT32, None),
        "dflash.rope.dimension_sections": ([16, 0, 0, 0], ARRAY, INT32),
        "dflash.embedding_scale": (2.0, FLOAT32, None),
        "dflash.attention.scale": (0.5, FLOAT32, None),
        "dflash.attention.value_scale": (0.25, FLOAT32, None),
        "dflash.logit_scale": (3.0, FLOAT32, None),
        "dflash.final_logit_softcapping": (30.0, FLOAT32, None),
        "dflash.hidden_activation": ("gelu_pytorch_tanh", STRING, None),
    }
    spec = DrafterSpec.read(drafter(tmp_path, keys))
    assert (spec.sliding_window, spec.sliding_layers) == (128, (True, True, False))
    rope = spec.rope
    assert (rope.scaling, rope.factor, rope.original_context) == ("yarn", 4.0, 1024)
    assert (rope.n_dims, rope.sections) == (32, (16, 0, 0, 0))
    scales = spec.scales
    assert (scales.embedding, scales.attention, scales.value) == (2.0, 0.5, 0.25)
    assert (scales.logit, scales.logit_softcap, scales.activation) == (3.0, 30.0, "gelu")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("dflash.block_size", None, "'dflash.block_size' is missing, expected an integer"),
        ("dflash.block_size", ("16", STRING, None), "is string ('16'), expected an integer"),
        ("dflash.block_size", (1, UINT32, None), "dflash.block_size is 1, expected at least 2"),
        ("dflash.block_size", (-3, INT32, None), "dflash.block_size is -3, expected at least 2"),
        ("dflash.block_size", (1 << 31, UINT32, None), "expected 2 to 256"),
        ("dflash.target_layers", None, "'dflash.target_layers' is missing"),
        ("dflash.target_layers", ([0, 2], ARRAY, INT32), "expected layer inputs from 1"),
        ("dflash.target_layers", ([2, 2, 4], ARRAY, INT32), "expected different layers"),
        ("dflash.target_layers", (["a"], ARRAY, STRING), "expected an array of integers"),
        ("dflash.target_layers", ([2, 4], ARRAY, INT32), "tensor fc.weight has the shape"),
        ("dflash.attention.head_count_kv", (3, UINT32, None), "expected a multiple of"),
        ("dflash.attention.head_count", (0, UINT32, None), "head_count is 0, expected 1"),
        ("dflash.attention.key_length", (63, UINT32, None), "expected an even number"),
        ("dflash.attention.causal", (1, UINT32, None), "causal"),
        ("dflash.attention.sliding_window", (64, UINT32, None), "sliding_window_pattern"),
        ("dflash.attention.layer_norm_rms_epsilon", (float("nan"), FLOAT32, None), "finite"),
        ("dflash.rope.scaling.type", ("longrope", STRING, None), "expected none, linear or yarn"),
        ("dflash.hidden_activation", ("relu", STRING, None), "'relu', expected one of silu"),
        ("dflash.embedding_length", (256, UINT32, None), "[512], expected [256]"),
        ("dflash.block_count", (2, UINT32, None), "is beyond dflash.block_count 2"),
        ("dflash.block_count", (4, UINT32, None), "blk.3.attn_norm.weight is missing"),
        ("tokenizer.ggml.mask_token_id", None, "'tokenizer.ggml.mask_token_id' is missing"),
        ("tokenizer.ggml.mask_token_id", (8192, UINT32, None), "is 8192, expected 0 to 8191"),
    ],
)
def test_a_drafter_with_a_bad_key(
    tmp_path: Path, key: str, value: Value | None, reason: str
) -> None:
    with pytest.raises(FileError) as caught:
        DrafterSpec.read(drafter(tmp_path, {key: value}))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("output_hc_scale.weight", "hyper-connections"),
        ("blk.1.something.weight", "unknown to us"),
    ],
)
def test_families_that_nothing_runs_are_named(tmp_path: Path, name: str, kind: str) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[name] = (np.zeros(32, np.float32), F32)

    with pytest.raises(FileError, match=kind) as caught:
        DrafterSpec.read(drafter(tmp_path, tensors=add))
    assert name in str(caught.value) and "does not run" in str(caught.value)


def test_optional_tensors_are_taken(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["rope_freqs.weight"] = (np.ones(32, np.float32), F32)
        tensors["blk.0.post_attention_norm.weight"] = (np.ones(512, np.float32), F32)
        tensors["blk.0.layer_output_scale.weight"] = (np.ones(1, np.float32), F32)

    DrafterSpec.read(drafter(tmp_path, tensors=add))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("blk.1.attn_v.weight"), "tensor blk.1.attn_v.weight is missing"),
        (
            lambda t: t.update({"output_norm.weight": (np.ones(511, np.float32), F32)}),
            "tensor output_norm.weight has the shape [511], expected [512]",
        ),
        (
            lambda t: t.update(
                {"output_norm.weight": (np.ones(512, np.float16), gguf.GGMLQuantizationType.F16)}
            ),
            "tensor output_norm.weight has the type F16, expected F32",
        ),
    ],
)
def test_a_drafter_with_bad_tensors(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], reason: str
) -> None:
    with pytest.raises(FileError) as caught:
        DrafterSpec.read(drafter(tmp_path, tensors=change))
    assert reason in str(caught.value)


def test_target_and_drafter_in_each_others_place() -> None:
    with pytest.raises(FileError, match=r"a DFlash drafter .* given as the target"):
        check_target(GgufFile.open(DRAFTER))
    with pytest.raises(FileError, match="'qwen3', expected 'dflash'"):
        check_pair(GgufFile.open(TARGET), GgufFile.open(TARGET))


@pytest.mark.parametrize("kind", ["bert", "clip", "t5encoder", "llada"])
def test_a_target_that_writes_no_text(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FileError, match=f"'{kind}', expected a language model"):
        check_target(of_architecture(tmp_path, kind))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"qwen3.block_count": None}, "'qwen3.block_count' is missing"),
        ({"qwen3.block_count": (0, UINT32, None)}, "qwen3.block_count is 0, expected 1 to 512"),
        ({"qwen3.embedding_length": (256, UINT32, None)}, "has the shape [512, 8192], expected"),
        ({"general.type": ("adapter", STRING, None)}, "general.type is 'adapter'"),
        ({"tokenizer.ggml.tokens": None}, "'tokenizer.ggml.tokens' is missing"),
    ],
)
def test_a_bad_target(tmp_path: Path, keys: Keys, reason: str) -> None:
    with pytest.raises(FileError) as caught:
        check_target(target(tmp_path, keys))
    assert reason in str(caught.value)


def mismatch(target_file: GgufFile, drafter_file: GgufFile) -> str:
    with pytest.raises(PairError) as caught:
        check_pair(target_file, drafter_file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_hidden_size(tmp_path: Path) -> None:
    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors["token_embd.weight"] = (np.zeros((8192, 256), np.float32), F32)

    narrower = target(tmp_path, {"qwen3.embedding_length": (256, UINT32, None)}, narrow)
    message = mismatch(narrower, GgufFile.open(DRAFTER))
    assert "embedding_length (hidden size) is 512 in the drafter" in message
    assert "256 in the target" in message and "trained for this target" in message


def test_taps_beyond_the_target(tmp_path: Path) -> None:
    # the output of the last layer is no layer's input
    for last, fits in ((7, True), (8, False), (60, False)):
        other = drafter(tmp_path, {"dflash.target_layers": ([2, 4, last], ARRAY, INT32)})
        if fits:
            check_pair(GgufFile.open(TARGET), other)
        else:
            message = mismatch(GgufFile.open(TARGET), other)
            assert f"[2, 4, {last}]" in message and "layers 0 to 7" in message


def test_another_tokenizer(tmp_path: Path) -> None:
    ours = GgufFile.open(TARGET)
    other = drafter(tmp_path, {"tokenizer.ggml.pre": ("llama-bpe", STRING, None)})
    message = mismatch(ours, other)
    assert "tokenizer.ggml.pre is 'llama-bpe'" in message and "'qwen2' in the target" in message

    tokens = list(ours.get("tokenizer.ggml.tokens"))
    tokens[7] = "another"
    other = drafter(tmp_path, {"tokenizer.ggml.tokens": (tokens, ARRAY, STRING)})
    assert "token 7 is 'another' in the drafter" in mismatch(ours, other)

    more = [*ours.get("tokenizer.ggml.tokens"), "one more"]
    kinds = ([1] * 8193, ARRAY, INT32)
    keys: Keys = {
        "tokenizer.ggml.tokens": (more, ARRAY, STRING),
        "tokenizer.ggml.token_type": kinds,
    }
    assert "vocabulary size is 8193 in the drafter" in mismatch(ours, drafter(tmp_path, keys))


def test_a_drafter_without_a_tokenizer_takes_the_targets(tmp_path: Path) -> None:
    bare = drafter(tmp_path, {"tokenizer.ggml.tokens": None})
    assert check_pair(GgufFile.open(TARGET), bare).n_vocab == 8192
    with pytest.raises(FileError, match="n_vocab unknown"):
        DrafterSpec.read(bare)


@pytest.mark.parametrize("name", ["qwen35", "mamba", "jamba"])
def test_recurrent_targets_are_refused(tmp_path: Path, name: str) -> None:
    message = mismatch(of_architecture(tmp_path, name), GgufFile.open(DRAFTER))
    assert f"'{name}'" in message and "recurrent" in message and "plain decoding" in message


@pytest.mark.parametrize("name", ["gemma3n", "deci", "step35", "nanbeige"])
def test_targets_without_taps_are_refused(tmp_path: Path, name: str) -> None:
    message = mismatch(of_architecture(tmp_path, name), GgufFile.open(DRAFTER))
    assert f"'{name}'" in message and "hidden states" in message and "plain decoding" in message


def test_plain_decoding_needs_no_taps(tmp_path: Path) -> None:
    check_target(of_architecture(tmp_path, "mamba"))
    check_target(of_architecture(tmp_path, "gemma3n"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "deepseek2", "glm4moe", "gpt-oss"])
def test_targets_of_other_architectures_are_drafted_for(tmp_path: Path, name: str) -> None:
    assert name in TAPPED_ARCHITECTURES - RECURRENT_ARCHITECTURES
    check_pair(of_architecture(tmp_path, name), GgufFile.open(DRAFTER))


def test_layers_that_can_be_tapped(tmp_path: Path) -> None:
    shipped = GgufFile.open(TARGET)
    check_taps(shipped, ())
    check_taps(shipped, (1, 7))
    for layer in (-1, 0, 8):
        with pytest.raises(InputError, match=f"input of layer {layer}; expected 1 to 7"):
            check_taps(shipped, (2, layer))
    more = target(tmp_path, {"qwen3.nextn_predict_layers": (1, UINT32, None)})
    with pytest.raises(InputError, match="expected 1 to 6"):
        check_taps(more, (7,))
    with pytest.raises(InputError, match="gemma3n"):
        check_taps(of_architecture(tmp_path, "gemma3n"), (2,))


def test_the_architectures_are_names_of_the_gguf_package_or_newer() -> None:
    newer = {"bailingmoe3", "deepseek4", "glm5-next", "kimi-k3", "minimax-01", "muse-glimmer"}
    newer |= {"cohere2moe", "qwen4exp"}
    known = set(gguf.MODEL_ARCH_NAMES.values())
    assert (TAPPED_ARCHITECTURES | RECURRENT_ARCHITECTURES) - known <= newer
