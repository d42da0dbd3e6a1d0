"""A drafter's GGUF file as a `DrafterSpec`: every key is read here, and checked.

The keys are those of llama.cpp's `src/models/dflash.cpp`.
"""

from typing import Any

from dflash_local.gguf.drafter_spec import DrafterSpec, Family, RopeSpec, ScaleSpec, SelectorSpec
from dflash_local.gguf.drafter_tensors import (
    D2T,
    MARKOV,
    check_tensors,
    drafter_family,
    has_bias,
    lacks_values,
)
from dflash_local.gguf.file import GgufFile

OLD_ARCHITECTURES = frozenset({"dflash-draft", "gemma4-dflash-draft"})
"""Names of drafters in old forks of llama.cpp. Their keys and tensors have other names."""

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_BLOCK_SIZE = 256
MAX_EXTENT = 1 << 20
_MAX_CONTEXT = (1 << 31) - 1
_LARGEST_FLOAT = 3.4e38  # of 32 bits


def read_drafter(file: GgufFile, *, n_vocab: int | None = None) -> DrafterSpec:
    """The spec of `file`.

    `n_vocab` is used if the file has no number of tokens. Raises FileError, which names the key or
    the tensor, if `file` is not a `dflash` drafter, lacks a key, contradicts itself, or is of a
    family that cannot be run here.
    """
    refuse_old(file)
    if file.architecture != "dflash":
        file.fail(
            f"general.architecture is {file.architecture!r}, expected 'dflash'; "
            "give a DFlash drafter as the draft model, the model itself as the target"
        )
    spec = spec_from_keys(file, drafter_family(file), file.n_vocab or n_vocab)
    check_tensors(file, spec)
    return spec


def refuse_old(file: GgufFile) -> None:
    """Raise FileError for a drafter that was made for an old fork of llama.cpp."""
    if file.architecture in OLD_ARCHITECTURES:
        file.fail(
            f"a DFlash drafter for an old fork of llama.cpp (general.architecture "
            f"{file.architecture!r}), expected 'dflash'; make a new file from the drafter's "
            "checkpoint with 'dflash-local convert'"
        )


def spec_from_keys(file: GgufFile, family: Family, n_vocab: int | None) -> DrafterSpec:
    """The spec of a `file` of this family. Raises FileError for its keys alone."""
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
    window, sliding_layers = _sliding(file, n_layer)
    return DrafterSpec(
        family=family,
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
        context_length=_count(file, "dflash.context_length", 1, _MAX_CONTEXT),
        rope=_rope(file, head_dim),
        scales=_scales(file, head_dim),
        n_vocab_draft=_rows(file, D2T, n_vocab),
        values_from_keys=lacks_values(file),
        causal=file.optional("dflash.attention.causal", bool, False),
        attention_bias=has_bias(file),
        selector=_selector(file, n_embd, n_vocab) if family == "dflash2" else None,
        markov_rank=_rows(file, MARKOV, 0) if family == "dspark" else 0,
        # For DSpark that is llama.cpp's default. DFlash with the layers of DSpark states it.
        sample_from_anchor=family != "dflash2"
        and file.optional("dflash.sample_from_anchor", bool, family == "dspark"),
    )


def _selector(file: GgufFile, n_embd: int, n_vocab: int) -> SelectorSpec:
    """The selector's sizes. Candidates and their scores must fit a row of `n_embd` values."""
    top_k = _count(file, "dflash.selector_top_k", 1, n_vocab)
    if top_k * (top_k + 1) > n_embd:
        file.fail(
            f"dflash.selector_top_k is {top_k}: candidates and scores, {top_k * (top_k + 1)} "
            f"values, exceed dflash.embedding_length, {n_embd}"
        )
    group_size = _count(file, "dflash.conv_group_size", 1, n_embd)
    if n_embd % group_size:
        file.fail(
            f"dflash.conv_group_size is {group_size}, expected a divisor of "
            f"dflash.embedding_length, {n_embd}"
        )
    return SelectorSpec(
        rank=_count(file, "dflash.selector_rank", 1, MAX_EXTENT),
        top_k=top_k,
        kernel_size=_count(file, "dflash.conv_kernel_size", 1, MAX_BLOCK_SIZE),
        group_size=group_size,
    )


def _rows(file: GgufFile, name: str, default: int) -> int:
    """The first extent of a tensor; `default` if the file does not have it."""
    tensor = file.tensors.get(name)
    return tensor.shape[0] if tensor else default


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
    # llama.cpp reads a missing type as linear, and a missing factor as 1
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
        _MAX_CONTEXT,
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


def _scales(file: GgufFile, head_dim: int) -> ScaleSpec:
    activation = file.optional("dflash.hidden_activation", str, "silu")
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu"}
    if activation not in names:
        file.fail(f"dflash.hidden_activation is {activation!r}, expected one of {', '.join(names)}")
    eps = file.require("dflash.attention.layer_norm_rms_epsilon", float)
    if not 0.0 < eps < 1.0:
        file.fail(f"dflash.attention.layer_norm_rms_epsilon is {eps}, expected 0 < eps < 1")
    return ScaleSpec(
        rms_eps=eps,
        # to llama.cpp, a 0 is no scale
        attention=_number(file, "dflash.attention.scale", 0.0) or head_dim**-0.5,
        embedding=_number(file, "dflash.embedding_scale", 0.0) or 1.0,
        value=_number(file, "dflash.attention.value_scale", 0.0),
        logit=_number(file, "dflash.logit_scale", 0.0),
        logit_softcap=_number(file, "dflash.final_logit_softcapping", 0.0),
        activation=names[activation],
    )


def _number(file: GgufFile, key: str, default: float) -> float:
    value = file.optional(key, float, default)
    if abs(value) > _LARGEST_FLOAT:
        file.fail(f"{key} is {value}, expected a number that fits 32 bits")
    return value


def _integers(file: GgufFile, key: str) -> tuple[int, ...]:
    values: list[Any] = file.require(key, list)
    if not all(type(value) is int for value in values):
        file.fail(f"{key} is {file.value_types[key]}, expected an array of integers")
    return tuple(values)


def _listed(values: tuple[int, ...]) -> str:
    return f"{list(values)}" if len(values) <= 16 else f"{list(values[:16])} and more"
