"""Configs of tiny drafters in the layouts in which real ones are published.

They have the fields of published ones (named beside each), at the sizes of a toy.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dflash_local.convert.config.target_link import TargetFacts

Config = dict[str, Any]

HEAD_DIM = 16
N_HEAD = 4
N_HEAD_KV = 2
N_FF = 96
MARKOV_RANK = 8
REDUCED = 64  # rows of a reduced head
N_TARGET_LAYERS = 8


def _qwen3(n_embd: int, n_vocab: int, n_layer: int = 2, **fields: Any) -> Config:
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": n_vocab - 1, "target_layer_ids": [1, 3, 5]},
        "dtype": "bfloat16",
        "eos_token_id": n_vocab - 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": n_embd,
        "initializer_range": 0.02,
        "intermediate_size": N_FF,
        "layer_types": ["full_attention"] * n_layer,
        "max_position_embeddings": 4096,
        "max_window_layers": n_layer,
        "model_type": "qwen3",
        "num_attention_heads": N_HEAD,
        "num_hidden_layers": n_layer,
        "num_key_value_heads": N_HEAD_KV,
        "num_target_layers": N_TARGET_LAYERS,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": n_vocab,
    } | fields


def _nested(config: Config, **fields: Any) -> Config:
    return config | {"dflash_config": config["dflash_config"] | fields}


def _plain(n_embd: int, n_vocab: int) -> Config:  # z-lab/Qwen3-8B-DFlash-b16
    return _qwen3(n_embd, n_vocab)


def _sliding(n_embd: int, n_vocab: int) -> Config:  # z-lab/Qwen3.6-27B-DFlash
    config = _qwen3(n_embd, n_vocab, 3, use_sliding_window=True, sliding_window=32)
    config["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"]
    config["rope_parameters"] = {"rope_theta": 10000000, "rope_type": "default"}
    config["is_causal"] = False
    config["tie_word_embeddings"] = False
    del config["rope_theta"], config["rope_scaling"], config["block_size"]
    return _nested(config, block_size=8)


def _swa_sinks(n_embd: int, n_vocab: int) -> Config:  # XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash
    config = _qwen3(n_embd, n_vocab, partial_rotary_factor=0.5, v_head_dim=HEAD_DIM)
    del config["layer_types"], config["use_sliding_window"], config["max_window_layers"]
    return _nested(
        config | {"block_size": 8, "sliding_window": 24, "rope_theta": 10000},
        block_size=8,
        num_anchors=4096,
        loss_decay_gamma=7.0,
        use_swa=True,
        swa_window_size=24,
        backbone_rotary_base=5000000,
        attention_value_scale=0.612,
        attention_sink_bias=True,
    )


def _yarn(n_embd: int, n_vocab: int) -> Config:  # z-lab/Kimi-K2.5-DFlash
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }
    return _qwen3(n_embd, n_vocab, rope_scaling=scaling, rope_theta=50000.0)


def _gpt_oss(n_embd: int, n_vocab: int) -> Config:  # z-lab/gpt-oss-20b-DFlash
    scaling = {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
    return _qwen3(
        n_embd,
        n_vocab,
        attention_bias=True,
        block_size=8,
        initial_context_length=4096,
        max_position_embeddings=131072,
        model_type="gpt_oss",
        rms_norm_eps=1e-05,
        rope_scaling=scaling,
        rope_theta=150000,
    )


def _linear(n_embd: int, n_vocab: int) -> Config:
    return _qwen3(n_embd, n_vocab, rope_scaling={"factor": 4.0, "rope_type": "linear"})


def _llama3(n_embd: int, n_vocab: int) -> Config:
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return _qwen3(n_embd, n_vocab, rope_scaling=scaling, rope_theta=500000.0)


def _scales(n_embd: int, n_vocab: int) -> Config:
    return _nested(
        _qwen3(n_embd, n_vocab, final_logit_softcapping=30.0),
        input_embedding_scale=8.0,
        output_multiplier=0.25,
        causal=True,
    )


def _own_head(n_embd: int, n_vocab: int) -> Config:
    return _qwen3(n_embd, n_vocab, tie_word_embeddings=False)


def _reduced(n_embd: int, n_vocab: int) -> Config:
    return _qwen3(n_embd, n_vocab, draft_vocab_size=REDUCED)


def _dflash2(n_embd: int, n_vocab: int) -> Config:  # z-lab/Muse-Glimmer-30B-DFlash2
    config = _qwen3(
        n_embd,
        n_vocab,
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        sliding_window=32,
        use_sliding_window=True,
        layer_types=["sliding_attention"] * 2,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    )
    del config["rope_theta"], config["rope_scaling"], config["block_size"], config["auto_map"]
    return _nested(
        config,
        block_size=8,
        conv_group_size=16,
        conv_kernel_size=2,
        final_logit_softcapping=20.0,
        output_multiplier=0.19611613513818404,
        selector_rank=12,
        selector_top_k=4,
    )


def _dspark(n_embd: int, n_vocab: int) -> Config:  # deepseek-ai/dspark_qwen3_4b_block7
    config = _qwen3(
        n_embd,
        n_vocab,
        architectures=["Qwen3DSparkModel"],
        block_size=7,
        mask_token_id=n_vocab - 1,
        target_layer_ids=[1, 3, 5],
        markov_rank=MARKOV_RANK,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    del config["dflash_config"], config["auto_map"]
    return config


def _dspark_headless(n_embd: int, n_vocab: int) -> Config:  # deepseek-ai/dflash_qwen3_4b_block7
    return _dspark(n_embd, n_vocab) | {"markov_rank": 0, "enable_confidence_head": False}


def _dspark_interleaved(n_embd: int, n_vocab: int) -> Config:  # LiquidAI's Lfm2DSparkDraftModel
    return _qwen3(
        n_embd,
        n_vocab,
        architectures=["Lfm2DSparkDraftModel"],
        block_size=9,
        rope_is_neox_style=False,
        markov_rank=MARKOV_RANK,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        rms_norm_eps=1e-05,
    )


def _dspark_sinks(n_embd: int, n_vocab: int) -> Config:  # nvidia's drafters for Nemotron
    config = _qwen3(
        n_embd,
        n_vocab,
        architectures=["Qwen3DSparkModel"],
        attention_sink_bias=True,
        block_size=8,
        draft_vocab_size=None,
        dspark_bonus_anchor=True,
        dspark_fixup_head_type="markov",
        dspark_markov_rank=MARKOV_RANK,
        has_embed_tokens=False,
        has_lm_head=False,
        layer_types=["sliding_attention"] * 2,
        markov_head_type="vanilla",
        markov_rank=MARKOV_RANK,
        mask_token_id=n_vocab - 1,
        rope_parameters=None,
        rope_theta=10000,
        sample_from_anchor=False,
        sliding_window=24,
    )
    return _nested(
        config,
        attention_sink_bias=True,
        causal=True,
        sample_from_anchor=False,
        swa_window_size=24,
        use_swa=True,
    )


def _speculators(n_embd: int, n_vocab: int) -> Config:  # RedHatAI's *-speculator.dspark
    layers = _qwen3(n_embd, n_vocab)
    for name in ("architectures", "auto_map", "block_size", "dflash_config", "rope_theta"):
        del layers[name]
    layers.pop("num_target_layers")
    layers["rope_parameters"] = {"rope_theta": 8000000, "rope_type": "default"}
    return {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "block_size": 8,
        "confidence_head_with_markov": True,
        "draft_vocab_size": REDUCED,
        "dtype": "bfloat16",
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": MARKOV_RANK,
        "mask_token_id": n_vocab - 1,
        "max_anchors": 1024,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "dspark",
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }


def _speculators_dflash(n_embd: int, n_vocab: int) -> Config:  # RedHatAI's *-speculator.dflash
    config = _speculators(n_embd, n_vocab)
    for name in ("confidence_head_with_markov", "enable_confidence_head"):
        del config[name]
    for name in ("markov_head_type", "markov_rank", "max_anchors"):
        del config[name]
    verifier = config["speculators_config"]["verifier"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": 7}
    return config | {
        "architectures": ["DFlashDraftModel"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "speculators_model_type": "dflash",
    }


def _speculators_dflash2(n_embd: int, n_vocab: int) -> Config:  # *-speculator.dflash2
    config = _speculators_dflash(n_embd, n_vocab)
    config["speculators_config"]["algorithm"] = "dflash2"
    window = {"sliding_window": 32, "use_sliding_window": True}
    layers = config["transformer_layer_config"] | window
    layers["layer_types"] = ["sliding_attention", "full_attention"]
    return config | {
        "architectures": ["DFlash2DraftModel"],
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "draft_vocab_size": n_vocab,
        "selector_rank": 12,
        "selector_top_k": 4,
        "sliding_window_non_causal": True,
        "speculators_model_type": "dflash2",
        "transformer_layer_config": layers,
    }


def _gemma4(n_embd: int, n_vocab: int) -> Config:  # deepseek-ai's Gemma4DSparkModel
    return {
        "architectures": ["Gemma4DSparkModel"],
        "attention_bias": False,
        "attention_k_eq_v": True,
        "block_size": 7,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "global_head_dim": 2 * HEAD_DIM,
        "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": n_embd,
        "intermediate_size": N_FF,
        "layer_types": ["full_attention"] * 2,
        "markov_head_type": "vanilla",
        "markov_rank": MARKOV_RANK,
        "mask_token_id": n_vocab - 1,
        "max_position_embeddings": 4096,
        "model_type": "gemma4_text",
        "num_attention_heads": N_HEAD,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": N_HEAD_KV,
        "num_target_layers": N_TARGET_LAYERS,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "target_layer_ids": [1, 3, 5],
        "tie_word_embeddings": True,
        "vocab_size": n_vocab,
    }


def _muse_glimmer(n_embd: int, n_vocab: int) -> Config:  # meta-models/Muse-Glimmer-30B-assistant
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "attention_dropout": 0.0,
        "block_size": 16,
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": n_embd,
        "intermediate_size": N_FF,
        "layer_types": ["sliding_attention"] * 2,
        "mask_token_id": n_vocab - 1,
        "max_position_embeddings": 4096,
        "model_type": "muse_glimmer_assistant",
        "num_attention_heads": N_HEAD,
        "num_hidden_layers": 2,
        "num_key_value_heads": N_HEAD_KV,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_window": 32,
        "target_layer_ids": [1, 3, 5],
    }


VARIANTS: Mapping[str, Callable[[int, int], Config]] = {
    "plain": _plain,
    "sliding": _sliding,
    "mrope": _sliding,  # told apart by its target
    "swa-sinks": _swa_sinks,
    "yarn": _yarn,
    "gpt-oss": _gpt_oss,
    "linear": _linear,
    "llama3": _llama3,
    "scales": _scales,
    "own-head": _own_head,
    "reduced": _reduced,
    "dflash2": _dflash2,
    "dspark": _dspark,
    "dspark-headless": _dspark_headless,
    "dspark-interleaved": _dspark_interleaved,
    "dspark-sinks": _dspark_sinks,
    "speculators": _speculators,
    "speculators-dflash": _speculators_dflash,
    "speculators-dflash2": _speculators_dflash2,
    "gemma4": _gemma4,
    "muse-glimmer": _muse_glimmer,
}


def config(name: str, *, n_embd: int = 64, n_vocab: int = 256) -> Config:
    """The config.json of the variant `name`."""
    return VARIANTS[name](n_embd, n_vocab)


def target_facts(name: str, *, n_embd: int = 64, n_vocab: int = 256) -> TargetFacts:
    """The target of the variant `name`, as far as a drafter depends on it."""
    if name == "mrope":
        return TargetFacts("qwen35", N_TARGET_LAYERS, n_embd, n_vocab, uses_mrope=True)
    return TargetFacts("qwen3", N_TARGET_LAYERS, n_embd, n_vocab)
