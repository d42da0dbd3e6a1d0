"""The tensors of a shape, in the target and in the drafter: name, size and type of each.

Names are those of llama.cpp's `src/models`, types those that its `llama-quantize` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as Type

from dflash_local.errors import InputError
from lab.shapes.shape import DeltaNet, Heads, PairShape, Selector, ShortConv


@dataclass(frozen=True)
class Quant:
    """The type of each kind of matrix. `more` is for those that suffer most from quantisation."""

    file_type: LlamaFileType
    base: Type
    more: Type
    head: Type
    experts: Type | None = None


QUANTS: dict[str, Quant] = {
    "Q4_K_M": Quant(LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K, Type.Q6_K, Type.Q6_K),
    "Q4_0": Quant(LlamaFileType.MOSTLY_Q4_0, Type.Q4_0, Type.Q4_0, Type.Q6_K),
    "Q8_0": Quant(LlamaFileType.MOSTLY_Q8_0, Type.Q8_0, Type.Q8_0, Type.Q8_0),
    "BF16": Quant(LlamaFileType.MOSTLY_BF16, Type.BF16, Type.BF16, Type.BF16),
    "MXFP4": Quant(
        LlamaFileType.MOSTLY_MXFP4_MOE, Type.Q8_0, Type.Q8_0, Type.Q8_0, experts=Type.MXFP4
    ),
}
# For rows that are not a whole number of blocks.
_FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor. `shape` is in ggml's order, row length first. `constant`: the value of all its
    elements; None: they are random."""

    name: str
    shape: tuple[int, ...]
    type: Type
    constant: float | None = None

    @property
    def n_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size


def find_quant(name: str) -> Quant:
    """The quantisation of that name, in upper or lower case. Raises InputError, which lists the
    names."""
    if name.upper() not in QUANTS:
        raise InputError(
            f"no quantisation {name!r} for shapes; expected one of {', '.join(QUANTS)}"
        )
    return QUANTS[name.upper()]


def target_tensors(shape: PairShape, quant: Quant) -> tuple[TensorSpec, ...]:
    """All tensors of the target. Raises InputError if rows do not divide into blocks."""
    n_embd = shape.n_embd
    embeddings = quant.head if shape.tied else quant.base
    tensors = [_matrix("token_embd.weight", n_embd, shape.n_vocab, embeddings)]
    if not shape.tied:
        tensors.append(_matrix("output.weight", n_embd, shape.n_vocab, quant.head))
    # LFM2 gives its last norm the name of one behind the embeddings.
    last_norm = "token_embd_norm" if shape.short_conv else "output_norm"
    tensors.append(_ones(f"{last_norm}.weight", n_embd))
    if shape.architecture == "llama":
        tensors.append(_ones("rope_freqs.weight", shape.heads.dim // 2))
    for layer in range(shape.n_layer + shape.n_further):
        block, is_further = f"blk.{layer}.", layer >= shape.n_layer
        more = quant.more if is_further or _more_bits(layer, shape.n_layer) else quant.base
        net = shape.delta_net
        if is_further:
            tensors.append(_matrix(f"{block}nextn.eh_proj.weight", 2 * n_embd, n_embd, quant.base))
            for norm in ("enorm", "hnorm", "shared_head_norm"):
                tensors.append(_ones(f"{block}nextn.{norm}.weight", n_embd))
        if net and net.is_recurrent(layer) and not is_further:
            tensors += _delta_net(block, n_embd, net, quant.base, more)
        elif shape.short_conv and shape.short_conv.is_recurrent(layer):
            tensors += _short_conv(block, n_embd, shape.short_conv, quant.base)
        else:
            tensors += _attention(block, n_embd, shape.heads, quant.base, more, gated=bool(net))
            if shape.architecture.startswith(("qwen3", "lfm2")):
                tensors += _head_norms(block, shape.heads.dim)
        if shape.architecture == "gpt-oss":
            tensors += _gpt_oss_extras(block, shape)
        elif net:
            tensors.append(_ones(f"{block}post_attention_norm.weight", n_embd))
        else:
            tensors.append(_ones(f"{block}ffn_norm.weight", n_embd))
        tensors += _feed_forward(block, shape, layer, quant, more)
    return tuple(tensors)


def drafter_tensors(shape: PairShape) -> tuple[TensorSpec, ...]:
    """All tensors of the drafter, whose matrices have eight bits, as those of converted drafters.
    Raises InputError if rows do not divide into blocks."""
    n_embd, drafter, kind = shape.n_embd, shape.drafter, Type.Q8_0
    heads = drafter.heads or shape.heads
    tensors = [
        _matrix("fc.weight", len(shape.taps) * n_embd, n_embd, kind),
        _ones("enc.output_norm.weight", n_embd),
        _ones("output_norm.weight", n_embd),
    ]
    for layer in range(drafter.n_layer):
        block = f"blk.{layer}."
        tensors += _attention(block, n_embd, heads, kind, kind)
        tensors += _head_norms(block, heads.dim)
        tensors.append(_ones(f"{block}ffn_norm.weight", n_embd))
        tensors += _dense(block, n_embd, drafter.n_ff, kind, kind)
        if drafter.selector:
            tensors += _convolutions(block, n_embd, drafter.selector, kind)
    if drafter.selector:
        rank = drafter.selector.rank
        for name in ("predecessor", "successor"):
            tensors.append(_matrix(f"selector_{name}.weight", rank, shape.n_vocab, kind))
        tensors.append(_matrix("selector_hidden.weight", n_embd, rank, kind))
    if drafter.markov_rank:
        rank = drafter.markov_rank
        for name in ("markov_w1.weight", "markov_w2.weight"):
            tensors.append(_matrix(name, rank, shape.n_vocab, kind))
        tensors.append(TensorSpec("conf_proj.weight", (n_embd + rank, 1), Type.F32))
        tensors.append(TensorSpec("conf_proj.bias", (1,), Type.F32))
    return tuple(tensors)


def _convolutions(block: str, n_embd: int, selector: Selector, base: Type) -> list[TensorSpec]:
    n_taps = selector.kernel_size
    n_kernels = 2 * n_taps * (n_embd // selector.group_size)
    tensors = []
    for name in (f"{block}attn_conv_", f"{block}ffn_conv_"):
        tensors.append(TensorSpec(name + "base", (n_embd, n_taps, 2), Type.F32, constant=0.5))
        tensors.append(_matrix(name + "proj.weight", n_embd, n_kernels, base))
    return tensors


def _more_bits(layer: int, n_layer: int) -> bool:
    """`use_more_bits` of llama.cpp's `src/llama-quant.cpp`."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def _attention(
    block: str, n_embd: int, heads: Heads, base: Type, more: Type, *, gated: bool = False
) -> list[TensorSpec]:
    n_q, n_kv = _attention_widths(heads)
    return [
        _ones(f"{block}attn_norm.weight", n_embd),
        _matrix(f"{block}attn_q.weight", n_embd, n_q * (2 if gated else 1), base),
        _matrix(f"{block}attn_k.weight", n_embd, n_kv, base),
        _matrix(f"{block}attn_v.weight", n_embd, n_kv, more),
        _matrix(f"{block}attn_output.weight", n_q, n_embd, base),
    ]


def _attention_widths(heads: Heads) -> tuple[int, int]:
    """Values of all queries of a token, and of all its keys."""
    return heads.n * heads.dim, heads.n_kv * heads.dim


def _delta_net(block: str, n_embd: int, net: DeltaNet, base: Type, more: Type) -> list[TensorSpec]:
    """Constants keep states finite: a state decays a little with each token."""
    n = net.n_value_heads
    parts = {"ssm_ba": 2 * n} if net.joined else {"ssm_alpha": n, "ssm_beta": n}
    return [
        _ones(f"{block}attn_norm.weight", n_embd),
        _matrix(f"{block}attn_qkv.weight", n_embd, net.n_conv, more),
        _matrix(f"{block}attn_gate.weight", n_embd, net.n_values, base),
        TensorSpec(f"{block}ssm_conv1d.weight", (net.kernel, net.n_conv), Type.F32, 0.5),
        TensorSpec(f"{block}ssm_dt.bias", (n,), Type.F32, 0.0),
        TensorSpec(f"{block}ssm_a", (n,), Type.F32, -0.1),
        *(_matrix(f"{block}{name}.weight", n_embd, width, base) for name, width in parts.items()),
        _ones(f"{block}ssm_norm.weight", net.head_dim),
        _matrix(f"{block}ssm_out.weight", net.n_values, n_embd, base),
    ]


def _short_conv(block: str, n_embd: int, conv: ShortConv, base: Type) -> list[TensorSpec]:
    return [
        _ones(f"{block}attn_norm.weight", n_embd),
        TensorSpec(f"{block}shortconv.conv.weight", (conv.kernel, n_embd), Type.F32, 0.5),
        _matrix(f"{block}shortconv.in_proj.weight", n_embd, 3 * n_embd, base),
        _matrix(f"{block}shortconv.out_proj.weight", n_embd, n_embd, base),
    ]


def _head_norms(block: str, head_dim: int) -> list[TensorSpec]:
    return [_ones(f"{block}attn_{name}_norm.weight", head_dim) for name in ("q", "k")]


def _gpt_oss_extras(block: str, shape: PairShape) -> list[TensorSpec]:
    n_q, n_kv = _attention_widths(shape.heads)
    widths = {"attn_q": n_q, "attn_k": n_kv, "attn_v": n_kv, "attn_output": shape.n_embd}
    return [
        *(TensorSpec(f"{block}{name}.bias", (n,), Type.F32) for name, n in widths.items()),
        _ones(f"{block}post_attention_norm.weight", shape.n_embd),
        TensorSpec(f"{block}attn_sinks.weight", (shape.heads.n,), Type.F32),
    ]


def _feed_forward(
    block: str, shape: PairShape, layer: int, quant: Quant, more: Type
) -> list[TensorSpec]:
    n_embd, experts = shape.n_embd, shape.experts
    if experts is None or layer < experts.n_dense:
        return _dense(block, n_embd, shape.n_ff, quant.base, more)
    routed, routed_more = quant.experts or quant.base, quant.experts or more
    n, n_ff = experts.n, experts.n_ff
    tensors = [
        TensorSpec(f"{block}ffn_gate_inp.weight", (n_embd, n), Type.F32),
        _matrix(f"{block}ffn_gate_exps.weight", n_embd, n_ff, routed, n),
        _matrix(f"{block}ffn_up_exps.weight", n_embd, n_ff, routed, n),
        _matrix(f"{block}ffn_down_exps.weight", n_ff, n_embd, routed_more, n),
    ]
    if experts.n_ff_shared:
        tensors += [
            TensorSpec(f"{block}ffn_gate_inp_shexp.weight", (n_embd,), Type.F32),
            _matrix(f"{block}ffn_gate_shexp.weight", n_embd, experts.n_ff_shared, quant.base),
            _matrix(f"{block}ffn_up_shexp.weight", n_embd, experts.n_ff_shared, quant.base),
            _matrix(f"{block}ffn_down_shexp.weight", experts.n_ff_shared, n_embd, more),
        ]
    if shape.architecture == "lfm2moe":
        tensors.append(TensorSpec(f"{block}exp_probs_b.bias", (n,), Type.F32, 0.0))
    if shape.architecture == "gpt-oss":
        tensors.append(TensorSpec(f"{block}ffn_gate_inp.bias", (n,), Type.F32))
        for name, width in (("gate", n_ff), ("up", n_ff), ("down", n_embd)):
            tensors.append(TensorSpec(f"{block}ffn_{name}_exps.bias", (width, n), Type.F32))
    return tensors


def _dense(block: str, n_embd: int, n_ff: int, base: Type, more: Type) -> list[TensorSpec]:
    return [
        _matrix(f"{block}ffn_gate.weight", n_embd, n_ff, base),
        _matrix(f"{block}ffn_up.weight", n_embd, n_ff, base),
        _matrix(f"{block}ffn_down.weight", n_ff, n_embd, more),
    ]


def _ones(name: str, n: int) -> TensorSpec:
    return TensorSpec(name, (n,), Type.F32, constant=1.0)


def _matrix(name: str, n_in: int, n_out: int, kind: Type, n_stacked: int = 0) -> TensorSpec:
    if n_in % GGML_QUANT_SIZES[kind][0]:
        kind = _FALLBACK.get(kind, kind)
    if n_in % GGML_QUANT_SIZES[kind][0]:
        raise InputError(f"{name}: rows of {n_in} are not a whole number of {kind.name} blocks")
    return TensorSpec(name, (n_in, n_out, n_stacked) if n_stacked else (n_in, n_out), kind)
