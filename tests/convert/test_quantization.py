"""Types and bytes: those of llama.cpp's own quantizer, but for what a draft hangs on."""

import ctypes
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type

from dflash_local.convert.quantization import OUTTYPES, encode, file_type, n_bytes, tensor_type
from dflash_local.errors import InputError
from dflash_local.llama import runtime
from tensor_plans import plan_of, plans

BLOCK_TYPES = (Type.Q8_0, Type.Q5_1, Type.Q5_0, Type.Q4_1, Type.Q4_0)
K_TYPES = {Type.Q6_K: 0.02, Type.Q5_K: 0.04, Type.Q4_K: 0.08, Type.Q3_K: 0.16}


def normal(n_rows: int, length: int) -> np.ndarray:
    rows = np.random.default_rng(7).standard_normal((n_rows, length), dtype=np.float32)
    return rows * np.float32(0.02)


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, Type.BF16, Type.F16, Type.F32])
def test_bytes_are_those_of_the_gguf_package(kind: Type) -> None:
    rows = normal(37, 256)
    rows[3] = 0
    rows[4, 5] = 3e4
    rows[5] = np.arange(256) - 128
    assert encode(rows, kind) == quants.quantize(rows, kind).tobytes()


@pytest.mark.parametrize(("kind", "error"), K_TYPES.items())
def test_k_quants_keep_the_values_within_their_error(kind: Type, error: float) -> None:
    rows = normal(16, 1024)
    raw = np.frombuffer(encode(rows, kind), np.uint8)
    back = quants.dequantize(raw.reshape(16, -1), kind)
    assert np.sqrt(np.mean((back - rows) ** 2) / np.mean(rows**2)) < error


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *K_TYPES])
def test_number_of_threads_does_not_change_the_bytes(kind: Type) -> None:
    rows = normal(11, 512)
    one = encode(rows, kind, n_threads=1)
    assert len(one) == n_bytes((512, 11), kind)
    for n_threads in (2, 5, 64):
        assert encode(rows, kind, n_threads=n_threads) == one


def test_shipped_drafter_has_the_types_that_it_would_get(pair: tuple[Path, Path]) -> None:
    for tensor in gguf.GGUFReader(pair[1]).tensors:
        plan = plan_of(tensor)
        assert tensor_type(plan, "q8_0", n_layer=3) == tensor.tensor_type, plan.name


@pytest.mark.slow
@pytest.mark.parametrize("outtype", ["q4_k_m", "q4_k_s", "q3_k_m", "q5_0"])
def test_files_are_mixed_as_llama_cpp_mixes_them(
    outtype: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Type by type and byte by byte, but for what is kept at 8 bits."""
    path = tmp_path / "theirs.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type(outtype)
    params.nthread = 2
    params.allow_requantize = True
    runtime.init()
    code = llama_cpp.llama_model_quantize(
        str(pair[1]).encode(), str(path).encode(), ctypes.byref(params)
    )
    assert code == 0, runtime.first_error_line()
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(pair[1]).tensors}
    for theirs in gguf.GGUFReader(path).tensors:
        plan = plan_of(theirs)
        kind = tensor_type(plan, outtype, n_layer=3)
        if plan.name == "fc.weight":
            continue
        assert kind == theirs.tensor_type, plan.name
        values = quants.dequantize(source[plan.name].data, source[plan.name].tensor_type)
        rows = values.reshape(-1, plan.shape[0])
        assert encode(rows, kind) == theirs.data.tobytes(), plan.name


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_what_a_draft_hangs_on_keeps_eight_bits(outtype: str) -> None:
    widest = tensor_type(plans("blk.0.attn_q.weight", (512, 512)), outtype, n_layer=5)
    for name in ("fc", "output", "selector_hidden", "markov_w1"):
        plan = plans(f"{name}.weight", (512, 512))
        kind = tensor_type(plan, outtype, n_layer=5)
        assert kind == (widest if outtype in ("f32", "bf16", "f16") else Type.Q8_0)
        block, size = GGML_QUANT_SIZES[kind]
        assert size / block >= 1


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_norms_vectors_and_small_tensors_stay_f32(outtype: str) -> None:
    for name, shape in (
        ("blk.0.attn_norm.weight", (4096,)),
        ("blk.0.attn_sinks.weight", (64,)),
        ("blk.0.attn_q.bias", (1 << 14,)),
        ("conf_proj.weight", (4352, 1)),
        ("blk.0.attn_conv_base", (4096, 5, 2)),
    ):
        assert tensor_type(plans(name, shape), outtype, n_layer=5) == Type.F32, name
    assert tensor_type(plans("d2t", (32000,)), outtype, n_layer=5) == Type.I64


@pytest.mark.parametrize("outtype", OUTTYPES)
@pytest.mark.parametrize("length", [4096, 2880, 2048 + 96, 100])
def test_rows_are_whole_blocks_of_the_type_chosen(outtype: str, length: int) -> None:
    for name in ("attn_q", "attn_v", "attn_output", "ffn_down"):
        plan = plans(f"blk.4.{name}.weight", (length, 512))
        kind = tensor_type(plan, outtype, n_layer=5)
        assert length % GGML_QUANT_SIZES[kind][0] == 0
        assert len(encode(normal(2, length), kind)) == n_bytes((length, 2), kind)


def test_ids_are_stored_exactly() -> None:
    ids = np.array([[0, 1, 262143, 151935]], np.float32)
    assert np.frombuffer(encode(ids, Type.I64), "<i8").tolist() == [0, 1, 262143, 151935]


def test_unknown_outtype_is_refused() -> None:
    with pytest.raises(InputError, match="'q9_9' is not known, expected one of f32, bf16"):
        tensor_type(plans("fc.weight", (512, 512)), "q9_9", n_layer=5)
