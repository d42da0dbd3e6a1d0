"""The metadata that the drafters of `hf_configs` become."""

from __future__ import annotations

from typing import Any

# What llama.cpp's own converter writes for these configs and targets, read from its files.
LAYERS = {
    "block_count": (2, "u32"),
    "context_length": (4096, "u32"),
    "embedding_length": (64, "u32"),
    "feed_forward_length": (96, "u32"),
    "attention.head_count": (4, "u32"),
    "attention.head_count_kv": (2, "u32"),
    "attention.key_length": (16, "u32"),
    "attention.value_length": (16, "u32"),
    "attention.layer_norm_rms_epsilon": (1e-06, "f32"),
    "rope.freq_base": (1000000.0, "f32"),
    "block_size": (16, "u32"),
    "target_layers": ((2, 4, 6), "arr_i32"),
}
SLIDING = LAYERS | {
    "block_count": (3, "u32"),
    "block_size": (8, "u32"),
    "rope.freq_base": (10000000.0, "f32"),
    "attention.causal": (False, "bool"),
    "attention.sliding_window": (32, "u32"),
    "attention.sliding_window_pattern": ((True, True, False), "arr_bool"),
}
DSPARK = LAYERS | {
    "block_size": (7, "u32"),
    "sample_from_anchor": (True, "bool"),
    "has_confidence_head": (True, "bool"),
}
EXPECTED: dict[str, dict[str, tuple[Any, str]]] = {
    "plain": LAYERS,
    "sliding": SLIDING,
    "mrope": SLIDING | {"rope.dimension_sections": ((8, 0, 0, 0), "arr_i32")},
    "swa-sinks": LAYERS
    | {
        "block_size": (8, "u32"),
        "rope.freq_base": (10000.0, "f32"),
        "rope.dimension_count": (8, "u32"),
        "attention.value_scale": (0.612, "f32"),
        "attention.sliding_window": (24, "u32"),
        "attention.sliding_window_pattern": ((True, True), "arr_bool"),
    },
    "yarn": LAYERS
    | {
        "rope.freq_base": (50000.0, "f32"),
        "rope.scaling.type": ("yarn", "str"),
        "rope.scaling.factor": (64.0, "f32"),
        "rope.scaling.original_context_length": (4096, "u32"),
        "rope.scaling.yarn_beta_fast": (32.0, "f32"),
        "rope.scaling.yarn_beta_slow": (1.0, "f32"),
    },
    "gpt-oss": LAYERS
    | {
        "context_length": (131072, "u32"),
        "block_size": (8, "u32"),
        "attention.layer_norm_rms_epsilon": (1e-05, "f32"),
        "rope.freq_base": (150000.0, "f32"),
        "rope.scaling.type": ("yarn", "str"),
        "rope.scaling.factor": (32.0, "f32"),
        "rope.scaling.original_context_length": (4096, "u32"),
    },
    "linear": LAYERS
    | {"rope.scaling.type": ("linear", "str"), "rope.scaling.factor": (4.0, "f32")},
    "llama3": LAYERS | {"rope.freq_base": (500000.0, "f32")},
    "scales": LAYERS
    | {
        "attention.causal": (True, "bool"),
        "embedding_scale": (8.0, "f32"),
        "logit_scale": (0.25, "f32"),
        "final_logit_softcapping": (30.0, "f32"),
    },
    "own-head": LAYERS,
    "reduced": LAYERS,
    "dflash2": LAYERS
    | {
        "block_size": (8, "u32"),
        "rope.freq_base": (500000.0, "f32"),
        "attention.causal": (False, "bool"),
        "attention.sliding_window": (32, "u32"),
        "attention.sliding_window_pattern": ((True, True), "arr_bool"),
        "conv_kernel_size": (2, "u32"),
        "conv_group_size": (16, "u32"),
        "selector_rank": (12, "u32"),
        "selector_top_k": (4, "u32"),
        "logit_scale": (0.19611613513818404, "f32"),
        "final_logit_softcapping": (20.0, "f32"),
    },
    "dspark": DSPARK,
    "dspark-headless": LAYERS | {"block_size": (7, "u32"), "sample_from_anchor": (True, "bool")},
    "dspark-interleaved": DSPARK
    | {
        "block_size": (9, "u32"),
        "attention.layer_norm_rms_epsilon": (1e-05, "f32"),
        "has_confidence_head": (False, "bool"),
    },
    "dspark-sinks": DSPARK
    | {
        "block_size": (8, "u32"),
        "rope.freq_base": (10000.0, "f32"),
        "attention.causal": (True, "bool"),
        "attention.sliding_window": (24, "u32"),
        "attention.sliding_window_pattern": ((True, True), "arr_bool"),
        "sample_from_anchor": (False, "bool"),
        "has_confidence_head": (False, "bool"),
    },
    "speculators": DSPARK
    | {
        "block_size": (8, "u32"),
        "rope.freq_base": (8000000.0, "f32"),
        "sample_from_anchor": (False, "bool"),
    },
    "speculators-dflash": LAYERS
    | {
        "block_size": (8, "u32"),
        "rope.freq_base": (8000000.0, "f32"),
    },
    "speculators-dflash2": LAYERS
    | {
        "block_size": (8, "u32"),
        "rope.freq_base": (8000000.0, "f32"),
        "attention.sliding_window": (32, "u32"),
        "attention.sliding_window_pattern": ((True, False), "arr_bool"),
        "conv_kernel_size": (2, "u32"),
        "conv_group_size": (16, "u32"),
        "selector_rank": (12, "u32"),
        "selector_top_k": (4, "u32"),
    },
    "gemma4": DSPARK
    | {
        "attention.head_count_kv": (1, "u32"),
        "attention.key_length": (32, "u32"),
        "attention.value_length": (32, "u32"),
        "attention.scale": (1.0, "f32"),
        "embedding_scale": (8.0, "f32"),
        "hidden_activation": ("gelu_pytorch_tanh", "str"),
        "rope.dimension_count": (32, "u32"),
    },
    "muse-glimmer": LAYERS
    | {
        "attention.layer_norm_rms_epsilon": (1e-05, "f32"),
        "rope.freq_base": (500000.0, "f32"),
        "attention.sliding_window": (32, "u32"),
        "attention.sliding_window_pattern": ((True, True), "arr_bool"),
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

# z-lab/Qwen3.8-27B-DFlash2, as published
QWEN38_DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [5, 19, 33, 47, 61],
    },
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": ["sliding_attention"] * 5,
    "max_position_embeddings": 262144,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "transformers_version": "5.15.0",
    "use_cache": True,
    "use_sliding_window": True,
    "vocab_size": 248320,
}
