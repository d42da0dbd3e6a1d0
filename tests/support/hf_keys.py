"""The metadata that the drafters of `hf_configs` become."""

from typing import Any

Keys = dict[str, Any]

_KINDS = {bool: "bool", int: "uint32", float: "float32", str: "string"}

# What llama.cpp's own converter writes for these configs and targets, read from its files.
_LAYERS: Keys = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-06,
    "rope.freq_base": 1000000.0,
    "block_size": 16,
    "target_layers": (2, 4, 6),
}
_SHORT = _LAYERS | {"block_size": 8}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 4}
_DSPARK = _LAYERS | {"block_size": 7, "sample_from_anchor": True, "has_confidence_head": True}


def _window(size: int, *layers: bool) -> Keys:
    return {"attention.sliding_window": size, "attention.sliding_window_pattern": layers}


def _yarn(factor: float) -> Keys:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": 4096,
    }


_SLIDING = (
    _SHORT
    | _window(32, True, True, False)
    | {"block_count": 3, "rope.freq_base": 10000000.0, "attention.causal": False}
)
_VALUES: dict[str, Keys] = {
    "plain": _LAYERS,
    "sliding": _SLIDING,
    "mrope": _SLIDING | {"rope.dimension_sections": (8, 0, 0, 0)},
    "swa-sinks": _SHORT
    | _window(24, True, True)
    | {"rope.freq_base": 10000.0, "rope.dimension_count": 8, "attention.value_scale": 0.612},
    "yarn": _LAYERS
    | _yarn(64.0)
    | {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
    | {"rope.freq_base": 50000.0},
    "gpt-oss": _SHORT
    | _yarn(32.0)
    | {"attention.layer_norm_rms_epsilon": 1e-05, "rope.freq_base": 150000.0}
    | {"context_length": 131072},
    "linear": _LAYERS | {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "llama3": _LAYERS | {"rope.freq_base": 500000.0},
    "scales": _LAYERS
    | {"embedding_scale": 8.0, "logit_scale": 0.25, "final_logit_softcapping": 30.0}
    | {"attention.causal": True},
    "own-head": _LAYERS,
    "reduced": _LAYERS,
    "dflash2": _SHORT
    | _window(32, True, True)
    | _SELECTOR
    | {"logit_scale": 0.19611613513818404, "final_logit_softcapping": 20.0}
    | {"rope.freq_base": 500000.0, "attention.causal": False},
    "dspark": _DSPARK,
    "dspark-headless": _LAYERS | {"block_size": 7, "sample_from_anchor": True},
    "dspark-interleaved": _DSPARK
    | {"block_size": 9, "attention.layer_norm_rms_epsilon": 1e-05, "has_confidence_head": False},
    "dspark-sinks": _SHORT
    | _window(24, True, True)
    | {"rope.freq_base": 10000.0, "attention.causal": True}
    | {"sample_from_anchor": False, "has_confidence_head": False},
    "speculators": _DSPARK
    | {"block_size": 8, "rope.freq_base": 8000000.0, "sample_from_anchor": False},
    "speculators-dflash": _SHORT | {"rope.freq_base": 8000000.0},
    "speculators-dflash2": _SHORT
    | _window(32, True, False)
    | _SELECTOR
    | {"rope.freq_base": 8000000.0},
    "gemma4": _DSPARK
    | {"attention.head_count_kv": 1, "attention.key_length": 32, "attention.value_length": 32}
    | {"attention.scale": 1.0, "embedding_scale": 8.0, "rope.dimension_count": 32}
    | {"hidden_activation": "gelu_pytorch_tanh"},
    "muse-glimmer": _LAYERS
    | _window(32, True, True)
    | {"attention.layer_norm_rms_epsilon": 1e-05, "rope.freq_base": 500000.0},
}


def typed(value: Any) -> tuple[Any, str]:
    """A value and the type that it is stored as."""
    if isinstance(value, tuple):
        return value, "array of bool" if isinstance(value[0], bool) else "array of int32"
    return value, _KINDS[type(value)]


EXPECTED = {
    name: {key: typed(value) for key, value in keys.items()} for name, keys in _VALUES.items()
}


def family_of(name: str) -> str:
    """The family of an architecture, whatever heads there are."""
    if name.endswith("dflash2"):
        return "dflash2"
    return "dspark" if name.startswith("dspark") or name in ("speculators", "gemma4") else "dflash"
