"""The tensors of a shape: name, size and type of each, in the target and in the drafter.

Names are those of llama.cpp's `src/models`, types those that its `llama-quantize` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash_local.bench.shapes.shape import Shape
from dflash_local.errors import InputError

_Type = GGMLQuantizationType
_F32 = _Type.F32


@dataclass(frozen=True)
class Quant:
    """Which type a matrix gets. `more` is for those that suffer most, as llama.cpp has it."""

    file_type: int
    base: GGMLQuantizationType
    more: GGMLQuantizationType
    head: GGMLQuantizationType
    experts: GGMLQuantizationType | None = None


QUANTS: dict[str, Quant] = {
    "Q4_K_M": Quant(15, _Type.Q4_K, _Type.Q6_K, _Type.Q6_K),
    "Q4_0": Quant(2, _Type.Q4_0, _Type.Q4_0, _Type.Q6_K),
    "Q8_0": Quant(7, _Type.Q8_0, _Type.Q8_0, _Type.Q8_0),
    "BF16": Quant(32, _Type.BF16, _Type.BF16, _Type.BF16),
    "MXFP4": Quant(38, _Type.Q8_0, _Type.Q8_0, _Type.Q8_0, experts=_Type.MXFP4),
}
# of rows that are no whole number of K-quant blocks
_FALLBACK = {_Type.Q4_K: _Type.Q5_0, _Type.Q6_K: _Type.Q8_0}


@dataclass(frozen=True)
class TensorSpec:
    """`shape` in ggml's order, the extent of a row first; `constant` None: random values."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    constant: float | None = None

    @property
    def n_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size


def find_quant(name: str) -> Quant:
    """The quantisation of that name, in any case. Raises InputError, listing all names."""
    if name.upper() not in QUANTS:
        raise InputError(
            f"no quantisation {name!r} for shapes; expected one of {', '.join(QUANTS)}"
        )
    return QUANTS[name.upper()]


def target_tensors(shape: Shape, quant: Quant) -> tuple[TensorSpec, ...]:
    """All tensors of the target. Raises InputError where rows do not divide into blocks."""
    n_embd = shape.n_embd
    embeddings = quant.head if shape.tied else quant.base
    tensors = [_matrix("token_embd.weight", n_embd, shape.n_vocab, embeddings)]
    if not shape.tied:
        tensors.append(_matrix("output.weight", n_embd, shape.n_vocab, quant.head))
    tensors.append(_ones("output_norm.weight", n_embd))
    if shape.architecture == "llama":
        tensors.append(_ones("rope_freqs.weight", shape.head_dim // 2))
    for layer in range(shape.n_layer):
        block = f"blk.{layer}."
        more = quant.more if _more_bits(layer, shape.n_layer) else quant.base
        heads = (shape.n_head, shape.n_head_kv, shape.head_dim)
        tensors += _attention(block, n_embd, heads, quant.base, more)
        if shape.architecture.startswith("qwen3"):
            tensors += _head_norms(block, shape.head_dim)
        if shape.architecture == "gpt-oss":
            tensors += _gpt_oss_extras(block, shape)
        else:
            tensors.append(_ones(f"{block}ffn_norm.weight", n_embd))
        tensors += _feed_forward(block, shape, quant, more)
    return tuple(tensors)


def drafter_tensors(shape: Shape, quant: Quant) -> tuple[TensorSpec, ...]:
    """All tensors of the drafter. Raises InputError where rows do not divide into blocks."""
    n_embd, drafter = shape.n_embd, shape.drafter
    # what every draft passes through keeps eight bits, as in converted drafters
    fc = _Type.BF16 if quant.base == _Type.BF16 else _Type.Q8_0
    tensors = [
        _matrix("fc.weight", len(shape.taps) * n_embd, n_embd, fc),
        _ones("enc.output_norm.weight", n_embd),
        _ones("output_norm.weight", n_embd),
    ]
    for layer in range(drafter.n_layer):
        block = f"blk.{layer}."
        more = quant.more if _more_bits(layer, drafter.n_layer) else quant.base
        heads = (drafter.n_head, drafter.n_head_kv, drafter.head_dim)
        tensors += _attention(block, n_embd, heads, quant.base, more)
        tensors += _head_norms(block, drafter.head_dim)
        tensors.append(_ones(f"{block}ffn_norm.weight", n_embd))
        tensors += _dense(block, n_embd, drafter.n_ff, quant.base, more)
    return tuple(tensors)


def _more_bits(layer: int, n_layer: int) -> bool:
    """`use_more_bits` of llama.cpp's `src/llama-quant.cpp`."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def _attention(
    block: str,
    n_embd: int,
    heads: tuple[int, int, int],
    base: GGMLQuantizationType,
    more: GGMLQuantizationType,
) -> list[TensorSpec]:
    n_head, n_head_kv, head_dim = heads
    return [
        _ones(f"{block}attn_norm.weight", n_embd),
        _matrix(f"{block}attn_q.weight", n_embd, n_head * head_dim, base),
        _matrix(f"{block}attn_k.weight", n_embd, n_head_kv * head_dim, base),
        _matrix(f"{block}attn_v.weight", n_embd, n_head_kv * head_dim, more),
        _matrix(f"{block}attn_output.weight", n_head * head_dim, n_embd, base),
    ]


def _head_norms(block: str, head_dim: int) -> list[TensorSpec]:
    return [_ones(f"{block}attn_{name}_norm.weight", head_dim) for name in ("q", "k")]


def _gpt_oss_extras(block: str, shape: Shape) -> list[TensorSpec]:
    widths = {
        "attn_q": shape.n_head * shape.head_dim,
        "attn_k": shape.n_head_kv * shape.head_dim,
        "attn_v": shape.n_head_kv * shape.head_dim,
        "attn_output": shape.n_embd,
    }
    biases = [TensorSpec(f"{block}{name}.bias", (n,), _F32) for name, n in widths.items()]
    return [
        *biases,
        _ones(f"{block}post_attention_norm.weight", shape.n_embd),
        TensorSpec(f"{block}attn_sinks.weight", (shape.n_head,), _F32),
    ]


def _feed_forward(
    block: str, shape: Shape, quant: Quant, more: GGMLQuantizationType
) -> list[TensorSpec]:
    n_embd, experts = shape.n_embd, shape.experts
    if experts is None:
        return _dense(block, n_embd, shape.n_ff, quant.base, more)
    base, more = quant.experts or quant.base, quant.experts or more
    n, n_ff = experts.n, experts.n_ff
    tensors = [
        TensorSpec(f"{block}ffn_gate_inp.weight", (n_embd, n), _F32),
        _matrix(f"{block}ffn_gate_exps.weight", n_embd, n_ff, base, n),
        _matrix(f"{block}ffn_up_exps.weight", n_embd, n_ff, base, n),
        _matrix(f"{block}ffn_down_exps.weight", n_ff, n_embd, more, n),
    ]
    if shape.architecture == "gpt-oss":
        tensors.append(TensorSpec(f"{block}ffn_gate_inp.bias", (n,), _F32))
        for name, width in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
            tensors.append(TensorSpec(f"{block}ffn_{name}_exps.bias", (width, n), _F32))
    return tensors


def _dense(
    block: str, n_embd: int, n_ff: int, base: GGMLQuantizationType, more: GGMLQuantizationType
) -> list[TensorSpec]:
    return [
        _matrix(f"{block}ffn_gate.weight", n_embd, n_ff, base),
        _matrix(f"{block}ffn_up.weight", n_embd, n_ff, base),
        _matrix(f"{block}ffn_down.weight", n_ff, n_embd, more),
    ]


def _ones(name: str, n: int) -> TensorSpec:
    return TensorSpec(name, (n,), _F32, constant=1.0)


def _matrix(
    name: str, n_in: int, n_out: int, kind: GGMLQuantizationType, n_stacked: int = 0
) -> TensorSpec:
    if n_in % GGML_QUANT_SIZES[kind][0]:
        kind = _FALLBACK.get(kind, kind)
    block = GGML_QUANT_SIZES[kind][0]
    if n_in % block:
        raise InputError(f"{name}: rows of {n_in} are no whole number of {kind.name} blocks")
    shape = (n_in, n_out, n_stacked) if n_stacked else (n_in, n_out)
    return TensorSpec(name, shape, kind)
