"""The metadata that the drafters of `hf_configs` become."""

from typing import Any

# What llama.cpp's own converter writes for these configs and targets, read from its files.
LAYERS = {
    "block_count": (2, "uint32"),
    "context_length": (4096, "uint32"),
    "embedding_length": (64, "uint32"),
    "feed_forward_length": (96, "uint32"),
    "attention.head_count": (4, "uint32"),
    "attention.head_count_kv": (2, "uint32"),
    "attention.key_length": (16, "uint32"),
    "attention.value_length": (16, "uint32"),
    "attention.layer_norm_rms_epsilon": (1e-06, "float32"),
    "rope.freq_base": (1000000.0, "float32"),
    "block_size": (16, "uint32"),
    "target_layers": ((2, 4, 6), "array of int32"),
}
SLIDING = LAYERS | {
    "block_count": (3, "uint32"),
    "block_size": (8, "uint32"),
    "rope.freq_base": (10000000.0, "float32"),
    "attention.causal": (False, "bool"),
    "attention.sliding_window": (32, "uint32"),
    "attention.sliding_window_pattern": ((True, True, False), "array of bool"),
}
DSPARK = LAYERS | {
    "block_size": (7, "uint32"),
    "sample_from_anchor": (True, "bool"),
    "has_confidence_head": (True, "bool"),
}
EXPECTED: dict[str, dict[str, tuple[Any, str]]] = {
    "plain": LAYERS,
    "sliding": SLIDING,
    "mrope": SLIDING | {"rope.dimension_sections": ((8, 0, 0, 0), "array of int32")},
    "swa-sinks": LAYERS
    | {
        "block_size": (8, "uint32"),
        "rope.freq_base": (10000.0, "float32"),
        "rope.dimension_count": (8, "uint32"),
        "attention.value_scale": (0.612, "float32"),
        "attention.sliding_window": (24, "uint32"),
        "attention.sliding_window_pattern": ((True, True), "array of bool"),
    },
    "yarn": LAYERS
    | {
        "rope.freq_base": (50000.0, "float32"),
        "rope.scaling.type": ("yarn", "string"),
        "rope.scaling.factor": (64.0, "float32"),
        "rope.scaling.original_context_length": (4096, "uint32"),
        "rope.scaling.yarn_beta_fast": (32.0, "float32"),
        "rope.scaling.yarn_beta_slow": (1.0, "float32"),
    },
    "gpt-oss": LAYERS
    | {
        "context_length": (131072, "uint32"),
        "block_size": (8, "uint32"),
        "attention.layer_norm_rms_epsilon": (1e-05, "float32"),
        "rope.freq_base": (150000.0, "float32"),
        "rope.scaling.type": ("yarn", "string"),
        "rope.scaling.factor": (32.0, "float32"),
        "rope.scaling.original_context_length": (4096, "uint32"),
    },
    "linear": LAYERS
    | {"rope.scaling.type": ("linear", "string"), "rope.scaling.factor": (4.0, "float32")},
    "llama3": LAYERS | {"rope.freq_base": (500000.0, "float32")},
    "scales": LAYERS
    | {
        "attention.causal": (True, "bool"),
        "embedding_scale": (8.0, "float32"),
        "logit_scale": (0.25, "float32"),
        "final_logit_softcapping": (30.0, "float32"),
    },
    "own-head": LAYERS,
    "reduced": LAYERS,
    "dflash2": LAYERS
    | {
        "block_size": (8, "uint32"),
        "rope.freq_base": (500000.0, "float32"),
        "attention.causal": (False, "bool"),
        "attention.sliding_window": (32, "uint32"),
        "attention.sliding_window_pattern": ((True, True), "array of bool"),
        "conv_kernel_size": (2, "uint32"),
        "conv_group_size": (16, "uint32"),
        "selector_rank": (12, "uint32"),
        "selector_top_k": (4, "uint32"),
        "logit_scale": (0.19611613513818404, "float32"),
        "final_logit_softcapping": (20.0, "float32"),
    },
    "dspark": DSPARK,
    "dspark-headless": LAYERS | {"block_size": (7, "uint32"), "sample_from_anchor": (True, "bool")},
    "dspark-interleaved": DSPARK
    | {
        "block_size": (9, "uint32"),
        "attention.layer_norm_rms_epsilon": (1e-05, "float32"),
        "has_confidence_head": (False, "bool"),
    },
    "dspark-sinks": DSPARK
    | {
        "block_size": (8, "uint32"),
        "rope.freq_base": (10000.0, "float32"),
        "attention.causal": (True, "bool"),
        "attention.sliding_window": (24, "uint32"),
        "attention.sliding_window_pattern": ((True, True), "array of bool"),
        "sample_from_anchor": (False, "bool"),
        "has_confidence_head": (False, "bool"),
    },
    "speculators": DSPARK
    | {
        "block_size": (8, "uint32"),
        "rope.freq_base": (8000000.0, "float32"),
        "sample_from_anchor": (False, "bool"),
    },
    "speculators-dflash": LAYERS
    | {"block_size": (8, "uint32"), "rope.freq_base": (8000000.0, "float32")},
    "speculators-dflash2": LAYERS
    | {
        "block_size": (8, "uint32"),
        "rope.freq_base": (8000000.0, "float32"),
        "attention.sliding_window": (32, "uint32"),
        "attention.sliding_window_pattern": ((True, False), "array of bool"),
        "conv_kernel_size": (2, "uint32"),
        "conv_group_size": (16, "uint32"),
        "selector_rank": (12, "uint32"),
        "selector_top_k": (4, "uint32"),
    },
    "gemma4": DSPARK
    | {
        "attention.head_count_kv": (1, "uint32"),
        "attention.key_length": (32, "uint32"),
        "attention.value_length": (32, "uint32"),
        "attention.scale": (1.0, "float32"),
        "embedding_scale": (8.0, "float32"),
        "hidden_activation": ("gelu_pytorch_tanh", "string"),
        "rope.dimension_count": (32, "uint32"),
    },
    "muse-glimmer": LAYERS
    | {
        "attention.layer_norm_rms_epsilon": (1e-05, "float32"),
        "rope.freq_base": (500000.0, "float32"),
        "attention.sliding_window": (32, "uint32"),
        "attention.sliding_window_pattern": ((True, True), "array of bool"),
    },
}

FAMILIES = {
    "dflash2": "dflash2",
    "dspark": "dspark",
    "dspark-headless": "dspark",
    "dspark-interleaved": "dspark",
    "dspark-sinks": "dspark",
    "speculators": "dspark",
    "speculators-dflash2": "dflash2",
    "gemma4": "dspark",
}
