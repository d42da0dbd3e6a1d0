"""The shape of a DFlash drafter, read from the keys and tensors of its GGUF (arch `dflash`).

Keys and tensor names are those of llama.cpp's `src/models/dflash.cpp`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .errors import FileError
from .gguf_file import GgufFile

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_BLOCK_SIZE = 256
MAX_EXTENT = 1 << 20

_LAYER_WEIGHTS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
_OPTIONAL_LAYER_WEIGHTS = ("post_attention_norm", "post_ffw_norm", "layer_output_scale")
_OPTIONAL_WEIGHTS = ("token_embd.weight", "output.weight", "rope_freqs.weight")

# ggml stores these and multiplies none of them
_NOT_MULTIPLIED = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})

# families of the same architecture that the fused graph does not compute
_OTHER_KINDS = (
    ("DFlash 2 (path selector and convolutions)", re.compile(r"^selector_|conv_(base|proj)")),
    ("DSpark on DeepSeek-V4 (hyper-connections)", re.compile(r"(^output_hc_|\.hc_)")),
    ("DSpark (Markov head)", re.compile(r"^(markov_|conf_proj)")),
    ("DFlash with a reduced vocabulary", re.compile(r"^d2t")),
    ("DFlash with attention sinks", re.compile(r"attn_sinks")),
    ("DFlash with scaled (NVFP4) weights", re.compile(r"scale$")),
)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of queries and keys, in the NeoX layout."""

    freq_base: float = 10000.0
    n_dims: int = 0
    """Rotated values of a head; the rest pass unchanged."""
    sections: tuple[int, ...] = ()
    """M-RoPE sections; empty = plain. Drafters rotate by the token position in either case."""
    scaling: str = "none"
    """"none", "linear" or "yarn". As llama.cpp does for this architecture, yarn takes
    ext_factor 1, beta_fast 32 and beta_slow 1 whatever the file says."""
    factor: float = 1.0
    """Context is stretched by this."""
    original_context: int = 0
    """Context length before the stretch, for yarn."""
    attn_factor: float = 1.0


@dataclass(frozen=True)
class ScaleSpec:
    """Constants of the forward pass; 0 means that the step is not there."""

    rms_eps: float
    embedding: float = 0.0
    attention: float = 0.0
    """Scale of query times key; 0 = 1 / sqrt(head_dim)."""
    value: float = 0.0
    """Scale of the attention's output."""
    logit: float = 0.0
    logit_softcap: float = 0.0
    activation: str = "silu"
    """"silu" or "gelu"."""


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter that the fused graph runs; its tensors have the shapes that follow from this."""

    block_size: int
    """Anchor and mask tokens of one block."""
    target_layers: tuple[int, ...]
    """Taps: tap k is the input of this layer of the target, the output of the layer before it."""
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    mask_token_id: int
    sliding_window: int
    """Tokens seen by the layers of `sliding_layers`; 0 = no such layers."""
    sliding_layers: tuple[bool, ...]
    context_length: int
    rope: RopeSpec
    scales: ScaleSpec

    @property
    def n_taps(self) -> int:
        return len(self.target_layers)

    @classmethod
    def read(cls, file: GgufFile, *, n_vocab: int | None = None) -> DrafterSpec:
        """The spec of `file`.

        `n_vocab` is used where the file itself tells none. Raises FileError, naming key or tensor,
        when `file` is no `dflash` drafter, lacks a key, contradicts itself, or is of a kind that
        the fused graph does not run (DFlash 2, DSpark, a reduced vocabulary).
        """
        if file.architecture != "dflash":
            file.fail(
                f"general.architecture is {file.architecture!r}, expected 'dflash'; "
                "give a DFlash drafter as the draft model, the model itself as the target"
            )
        _check_kind(file)
        spec = _from_keys(file, file.n_vocab or n_vocab)
        _check_shapes(file, spec)
        return spec


def _from_keys(file: GgufFile, n_vocab: int | None) -> DrafterSpec:
    n_layer = _count(file, "dflash.block_count", 1, MAX_LAYERS)
    n_embd = _count(file, "dflash.embedding_length", 1, MAX_EXTENT)
    n_head = _count(file, "dflash.attention.head_count", 1, MAX_EXTENT)
    n_head_kv = _count(file, "dflash.attention.head_count_kv", 1, n_head, default=n_head)
    if n_head % n_head_kv:
        file.fail(
            f"dflash.attention.head_count is {n_head}, expected a multiple of "
            f"dflash.attention.head_count_kv, {n_head_kv}"
        )
    head_dim = _count(file, "dflash.attention.key_length", 1, 1024, default=n_embd // n_head)
    if head_dim < 2 or head_dim % 2:
        file.fail(f"dflash.attention.key_length is {head_dim}, expected an even number")
    value_dim = file.optional("dflash.attention.value_length", int, head_dim)
    if value_dim != head_dim:
        file.fail(
            f"dflash.attention.value_length is {value_dim}, key_length {head_dim}: must agree"
        )
    if n_vocab is None:
        file.fail(
            "no tokenizer.ggml.tokens, dflash.vocab_size or token_embd.weight: n_vocab unknown"
        )
    if file.optional("dflash.attention.causal", bool, False):
        file.fail("dflash.attention.causal is true: drafters with causal blocks are not supported")
    window, sliding_layers = _sliding(file, n_layer)
    return DrafterSpec(
        block_size=_block_size(file),
        target_layers=_target_layers(file),
        n_embd=n_embd,
        n_layer=n_layer,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        n_ff=_count(file, "dflash.feed_forward_length", 1, MAX_EXTENT),
        n_vocab=n_vocab,
        mask_token_id=_mask_token_id(file, n_vocab),
        sliding_window=window,
        sliding_layers=sliding_layers,
        context_length=_count(file, "dflash.context_length", 1, 1 << 31),
        rope=_rope(file, head_dim),
        scales=_scales(file),
    )


def _count(file: GgufFile, key: str, low: int, high: int, *, default: int | None = None) -> int:
    value = file.require(key, int) if default is None else file.optional(key, int, default)
    if not low <= value <= high:
        file.fail(f"{key} is {value}, expected {low} to {high}")
    return value


def _block_size(file: GgufFile) -> int:
    size = file.require("dflash.block_size", int)
    if size < 2:
        file.fail(
            f"dflash.block_size is {size}, expected at least 2: the anchor and one mask token"
        )
    return _count(file, "dflash.block_size", 2, MAX_BLOCK_SIZE)


def _target_layers(file: GgufFile) -> tuple[int, ...]:
    key = "dflash.target_layers"
    layers = _integers(file, key)
    if not layers:
        file.fail(f"{key} is empty, expected the target's layers to tap")
    if min(layers) < 1 or max(layers) > MAX_LAYERS:
        file.fail(f"{key} is {_listed(layers)}, expected layer inputs from 1 to {MAX_LAYERS}")
    if len(set(layers)) != len(layers):
        file.fail(f"{key} is {_listed(layers)}, expected different layers")
    return layers


def _mask_token_id(file: GgufFile, n_vocab: int) -> int:
    key = "tokenizer.ggml.mask_token_id"
    mask = file.require(key, int)
    if not 0 <= mask < n_vocab:
        file.fail(f"{key} is {mask}, expected 0 to {n_vocab - 1}, the drafter's vocabulary")
    return mask


def _sliding(file: GgufFile, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    window = file.optional("dflash.attention.sliding_window", int, 0)
    if window < 0 or window >= 1 << 31:
        file.fail(f"dflash.attention.sliding_window is {window}, expected 0 or more tokens")
    if window == 0:
        return 0, (False,) * n_layer
    key = "dflash.attention.sliding_window_pattern"
    pattern = file.require(key, list)
    if len(pattern) != n_layer or not all(isinstance(value, int) for value in pattern):
        file.fail(f"{key} has {len(pattern)} values, expected {n_layer} bools, one a layer")
    return window, tuple(bool(value) for value in pattern)


def _rope(file: GgufFile, head_dim: int) -> RopeSpec:
    sections: tuple[int, ...] = ()
    if "dflash.rope.dimension_sections" in file.metadata:
        sections = _integers(file, "dflash.rope.dimension_sections")
        if len(sections) > 4 or any(sections[1:]) or min(sections, default=0) < 0:
            file.fail(
                f"dflash.rope.dimension_sections is {_listed(sections)}, expected [n, 0, 0, 0]: "
                "a drafter rotates by the token position alone"
            )
    n_dims = _count(file, "dflash.rope.dimension_count", 2, head_dim, default=head_dim)
    if n_dims % 2:
        file.fail(f"dflash.rope.dimension_count is {n_dims}, expected an even number")
    # llama.cpp takes a missing type for linear, and a missing factor for 1
    scaling = file.optional("dflash.rope.scaling.type", str, "linear")
    if scaling not in ("none", "linear", "yarn"):
        file.fail(f"dflash.rope.scaling.type is {scaling!r}, expected none, linear or yarn")
    factor = _number(file, "dflash.rope.scaling.factor", 0.0)
    factor = factor or _number(file, "dflash.rope.scale_linear", 0.0) or 1.0
    if factor < 0.0:
        file.fail(f"dflash.rope.scaling.factor is {factor}, expected a positive number")
    freq_base = _number(file, "dflash.rope.freq_base", RopeSpec.freq_base)
    if freq_base <= 0.0:
        file.fail(f"dflash.rope.freq_base is {freq_base}, expected a positive number")
    original_context = _count(
        file,
        "dflash.rope.scaling.original_context_length",
        1,
        1 << 31,
        default=file.require("dflash.context_length", int),
    )
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        scaling, factor = "none", 1.0
    return RopeSpec(
        freq_base=freq_base,
        n_dims=n_dims,
        sections=sections,
        scaling=scaling,
        factor=factor,
        original_context=original_context,
        attn_factor=_number(file, "dflash.rope.scaling.attn_factor", 1.0),
    )


def _scales(file: GgufFile) -> ScaleSpec:
    activation = file.optional("dflash.hidden_activation", str, "silu")
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu"}
    if activation not in names:
        file.fail(f"dflash.hidden_activation is {activation!r}, expected one of {', '.join(names)}")
    eps = file.require("dflash.attention.layer_norm_rms_epsilon", float)
    if not 0.0 < eps < 1.0:
        file.fail(f"dflash.attention.layer_norm_rms_epsilon is {eps}, expected 0 < eps < 1")
    return ScaleSpec(
        rms_eps=eps,
        embedding=_number(file, "dflash.embedding_scale", 0.0),
        attention=_number(file, "dflash.attention.scale", 0.0),
        value=_number(file, "dflash.attention.value_scale", 0.0),
        logit=_number(file, "dflash.logit_scale", 0.0),
        logit_softcap=_number(file, "dflash.final_logit_softcapping", 0.0),
        activation=names[activation],
    )


def _number(file: GgufFile, key: str, default: float) -> float:
    return file.optional(key, float, default)


def _integers(file: GgufFile, key: str) -> tuple[int, ...]:
    values: list[Any] = file.require(key, list)
    if not all(type(value) is int for value in values):
        file.fail(f"{key} is {file.value_types[key]}, expected an array of integers")
    return tuple(values)


def _listed(values: tuple[int, ...]) -> str:
    return f"{list(values)}" if len(values) <= 16 else f"{list(values[:16])} and more"


def _check_kind(file: GgufFile) -> None:
    known = re.compile(
        r"fc\.weight|enc\.output_norm\.weight|output_norm\.weight|"
        + "|".join(re.escape(name) for name in _OPTIONAL_WEIGHTS)
        + rf"|blk\.\d+\.({'|'.join(_LAYER_WEIGHTS + _OPTIONAL_LAYER_WEIGHTS)})\.weight"
    )
    unknown = [name for name in file.tensors if not known.fullmatch(name)]
    if not unknown:
        return
    kinds = [kind for kind, mark in _OTHER_KINDS if any(mark.search(name) for name in unknown)]
    listed = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
    file.fail(
        f"a drafter of the kind {kinds[0] if kinds else 'unknown to us'}, which this version does "
        f"not run (tensors {listed}); use a DFlash drafter without these"
    )


def _check_shapes(file: GgufFile, spec: DrafterSpec) -> None:
    required, optional = _expected_shapes(spec)
    faults = [f"tensor {name} is missing" for name in required if name not in file.tensors]
    expected = required | optional
    for name, tensor in file.tensors.items():
        if len(_trimmed(tensor.shape)) == 1 and tensor.type_name != "F32":
            faults.append(f"tensor {name} has the type {tensor.type_name}, expected F32")
        elif tensor.type_name in _NOT_MULTIPLIED:
            faults.append(f"tensor {name} has the type {tensor.type_name}, expected a weight type")
        if name not in expected:
            faults.append(f"tensor {name} is beyond dflash.block_count {spec.n_layer}")
        elif _trimmed(tensor.shape) != _trimmed(expected[name]):
            faults.append(
                f"tensor {name} has the shape {list(tensor.shape)}, expected {list(expected[name])}"
            )
    if faults:
        more = f"\n(and {len(faults) - 8} more)" if len(faults) > 8 else ""
        raise FileError("\n".join(f"{file.path}: {fault}" for fault in faults[:8]) + more)


def _expected_shapes(
    spec: DrafterSpec,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes in ggml's order of the weights that must and of those that may be there."""
    n_embd, n_ff, head = spec.n_embd, spec.n_ff, spec.head_dim
    n_q, n_kv = spec.n_head * head, spec.n_head_kv * head
    required: dict[str, tuple[int, ...]] = {
        "fc.weight": (spec.n_taps * n_embd, n_embd),
        "enc.output_norm.weight": (n_embd,),
        "output_norm.weight": (n_embd,),
    }
    optional: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (n_embd, spec.n_vocab),
        "output.weight": (n_embd, spec.n_vocab),
        "rope_freqs.weight": (head // 2,),
    }
    shapes = (
        (n_embd,),
        (n_embd, n_q),
        (n_embd, n_kv),
        (n_embd, n_kv),
        (n_q, n_embd),
        (head,),
        (head,),
        (n_embd,),
        (n_embd, n_ff),
        (n_embd, n_ff),
        (n_ff, n_embd),
    )
    for layer in range(spec.n_layer):
        for weight, shape in zip(_LAYER_WEIGHTS, shapes, strict=True):
            required[f"blk.{layer}.{weight}.weight"] = shape
        for weight, shape in zip(
            _OPTIONAL_LAYER_WEIGHTS, ((n_embd,), (n_embd,), (1,)), strict=True
        ):
            optional[f"blk.{layer}.{weight}.weight"] = shape
    return required, optional


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` without the ones that ggml pads it with."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
