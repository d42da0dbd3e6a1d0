"""The tiny drafter in other layouts: with small heads and other parts that leave most of what it
was trained for, so that the tiny target accepts its drafts."""

import zlib
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

import tiny_coder
from gguf_files import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Tensor, Value, changed, parts

F16 = gguf.GGMLQuantizationType.F16
F32 = gguf.GGMLQuantizationType.F32
I64 = gguf.GGMLQuantizationType.I64

RANK, TOP_K, TAPS, GROUP = 32, 6, 3, 64
_Change = Callable[[dict[str, Tensor]], None]


def _values(name: str, *shape: int, size: float) -> NDArray[np.float32]:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return (size * random.standard_normal(shape)).astype(np.float32)


def _sizes(tensors: dict[str, Tensor]) -> tuple[int, int, int]:
    """Layers, hidden size, heads."""
    n_layer = sum(name.endswith("attn_norm.weight") for name in tensors)
    keys, _ = parts(tiny_coder.pair()[1])
    return n_layer, len(tensors["output_norm.weight"][0]), keys["dflash.attention.head_count"][0]


def _n_vocab() -> int:
    return len(parts(tiny_coder.pair()[0])[0]["tokenizer.ggml.tokens"][0])


def _markov_alone(tensors: dict[str, Tensor]) -> None:
    """Without a head for the confidence."""
    for name in ("markov_w1.weight", "markov_w2.weight"):
        rows = _values(name, _n_vocab(), RANK, size=0.3)
        tensors[name] = rows.astype(np.float16), F16


def _markov(tensors: dict[str, Tensor]) -> None:
    _markov_alone(tensors)
    n_embd = _sizes(tensors)[1]
    tensors["conf_proj.weight"] = _values("conf_proj", 1, n_embd + RANK, size=0.02), F32
    tensors["conf_proj.bias"] = np.ones(1, np.float32), F32


def _selector(tensors: dict[str, Tensor]) -> None:
    n_layer, n_embd, _ = _sizes(tensors)
    for name in ("predecessor", "successor"):
        rows = _values(name, _n_vocab(), RANK, size=0.3).astype(np.float16)
        tensors[f"selector_{name}.weight"] = rows, F16
    gate = _values("hidden", RANK, n_embd, size=n_embd**-0.5)
    tensors["selector_hidden.weight"] = gate.astype(np.float16), F16
    for layer in range(n_layer):
        for part in ("attn", "ffn"):
            name = f"blk.{layer}.{part}_conv_"
            base = _values(name, 2, TAPS, n_embd, size=0.01)
            base[:, 0] += 1  # a row is mostly itself
            tensors[name + "base"] = base, F32
            n_kernels = 2 * TAPS * (n_embd // GROUP)
            tensors[name + "proj.weight"] = _values(name, n_kernels, n_embd, size=1e-4), F32


def _reduced(tensors: dict[str, Tensor]) -> None:
    """A head of its own for half of the tokens, those of text among them."""
    _, target = parts(tiny_coder.pair()[0])
    data, kind = target.get("output.weight", target["token_embd.weight"])
    known = np.sort(np.r_[: _n_vocab() // 2])
    tensors["output.weight"] = np.ascontiguousarray(data[known]), kind
    tensors["d2t"] = known.astype(np.int64), I64
    if "markov_w2.weight" in tensors:
        rows, kind = tensors["markov_w2.weight"]
        tensors["markov_w2.weight"] = np.ascontiguousarray(rows[known]), kind


def _sinks(tensors: dict[str, Tensor]) -> None:
    n_layer, _, n_head = _sizes(tensors)
    for layer in range(n_layer):
        tensors[f"blk.{layer}.attn_sinks.weight"] = np.full(n_head, -1, np.float32), F32


def _scales(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("blk.0.") and "norm" not in n]:
        tensors[name.removesuffix("weight") + "scale"] = np.full(1, 0.95, np.float32), F32


def _biases(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if ".attn_" in n and "norm" not in n]:
        rows = len(tensors[name][0])
        tensors[name.removesuffix("weight") + "bias"] = _values(name, rows, size=0.01), F32


def _rope_factors(tensors: dict[str, Tensor]) -> None:
    half = len(tensors["blk.0.attn_k_norm.weight"][0]) // 2
    tensors["rope_freqs.weight"] = np.linspace(1, 1.01, half, dtype=np.float32), F32


def _own_ends(tensors: dict[str, Tensor]) -> None:
    _, target = parts(tiny_coder.pair()[0])
    tensors["token_embd.weight"] = target["token_embd.weight"]
    tensors["output.weight"] = target.get("output.weight", target["token_embd.weight"])


def _gemma4(tensors: dict[str, Tensor]) -> None:
    """Values from keys, norms after each part, scaled layers."""
    n_layer, n_embd, _ = _sizes(tensors)
    for layer in range(n_layer):
        del tensors[f"blk.{layer}.attn_v.weight"]
        for part in ("attention", "ffw"):
            ones = np.ones(n_embd, np.float32), F32
            tensors[f"blk.{layer}.post_{part}_norm.weight"] = ones
        scale = np.full(1, 0.9, np.float32), F32
        tensors[f"blk.{layer}.layer_output_scale.weight"] = scale


def _all(*changes: _Change) -> _Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for one in changes:
            one(tensors)

    return change


def _as_it_is(tensors: dict[str, Tensor]) -> None:
    pass


def _number(value: int) -> Value:
    return value, UINT32, None


def _float(value: float) -> Value:
    return value, FLOAT32, None


def _windows(*layers: bool) -> dict[str, Value | None]:
    return {
        "dflash.attention.sliding_window": _number(48),
        "dflash.attention.sliding_window_pattern": (list(layers), ARRAY, BOOL),
    }


_SELECTOR_KEYS: dict[str, Value | None] = {
    "dflash.selector_rank": _number(RANK),
    "dflash.selector_top_k": _number(TOP_K),
    "dflash.conv_kernel_size": _number(TAPS),
    "dflash.conv_group_size": _number(GROUP),
}
_HEAD_DIM = 64
_CAPS: dict[str, Value | None] = {
    "dflash.logit_scale": _float(0.9),
    "dflash.final_logit_softcapping": _float(40.0),
}
_CAUSAL: dict[str, Value | None] = {"dflash.attention.causal": (True, BOOL, None)}
_FROM_MASKS: dict[str, Value | None] = {"dflash.sample_from_anchor": (False, BOOL, None)}
LAYOUTS: dict[str, tuple[dict[str, Value | None], _Change]] = {
    "DSpark": (_FROM_MASKS, _markov),
    "DSpark from the anchor": ({}, _markov),
    "DSpark of half of the tokens": (_FROM_MASKS, _all(_markov, _reduced)),
    "DFlash 2": (_SELECTOR_KEYS, _selector),
    "DFlash 2 of half of the tokens": (_SELECTOR_KEYS, _all(_selector, _reduced)),
    "half of the tokens": ({}, _reduced),
    "sinks": ({}, _sinks),
    "scales": ({}, _scales),
    "biases": ({}, _biases),
    "factors of RoPE": ({}, _rope_factors),
    "YaRN": (
        {
            "dflash.rope.scaling.type": ("yarn", STRING, None),
            "dflash.rope.scaling.factor": _float(1.05),
            "dflash.rope.scaling.original_context_length": _number(4096),
            "dflash.rope.scaling.yarn_beta_fast": _float(32.0),
            "dflash.rope.scaling.yarn_beta_slow": _float(1.0),
        },
        _as_it_is,
    ),
    "linear RoPE": (
        {
            "dflash.rope.scaling.type": ("linear", STRING, None),
            "dflash.rope.scaling.factor": _float(1.001),
        },
        _as_it_is,
    ),
    "M-RoPE": (
        {"dflash.rope.dimension_sections": ([_HEAD_DIM // 2, 0, 0, 0], ARRAY, INT32)},
        _as_it_is,
    ),
    "windows in some layers": (_windows(True, False, True), _as_it_is),
    "embeddings and head of its own": ({}, _own_ends),
    "scales and caps of logits": (_CAPS | {"dflash.embedding_scale": _float(1.1)}, _as_it_is),
    "Gemma 4": ({}, _gemma4),
    "from the anchor": ({"dflash.sample_from_anchor": (True, BOOL, None)}, _as_it_is),
    "causal": (_CAUSAL, _as_it_is),
    # Several at once, as published drafters have them.
    "DFlash 2 of Muse-Glimmer": (
        _SELECTOR_KEYS | _windows(True, True, True) | _CAPS | {"dflash.logit_scale": _float(1.2)},
        _selector,
    ),
    "DSpark of Gemma 4": (
        {
            "dflash.attention.scale": _float(_HEAD_DIM**-0.5),
            "dflash.hidden_activation": ("gelu_pytorch_tanh", STRING, None),
        },
        _all(_markov, _gemma4),
    ),
    "DSpark of Nemotron": (
        _FROM_MASKS
        | _CAUSAL
        | _windows(True, True, True)
        | {"dflash.has_confidence_head": (False, BOOL, None)},
        _all(_markov_alone, _sinks),
    ),
    "MiMo": (
        _windows(True, True, True)
        | {
            "dflash.attention.value_scale": _float(0.95),
            "dflash.rope.dimension_count": _number(_HEAD_DIM // 2),
        },
        _sinks,
    ),
}


def in_layout(name: str, path: Path) -> Path:
    """The tiny drafter at `path` in one of `LAYOUTS`."""
    keys, change = LAYOUTS[name]
    return changed(tiny_coder.pair()[1], path, keys=keys, tensors=change)
