"""Configs of tiny drafters in the layouts in which real ones are published.

They have the fields of published ones (named beside each), at the sizes of a toy.
"""

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


def _qwen3(n_embd: int, n_vocab: int) -> Config:
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
        "layer_types": ["full_attention"] * 2,
        "max_position_embeddings": 4096,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": N_HEAD,
        "num_hidden_layers": 2,
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
    }


def _nested(config: Config, **fields: Any) -> Config:
    return config | {"dflash_config": config["dflash_config"] | fields}


def _without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def _theta(value: float) -> Config:
    return {"rope_parameters": {"rope_theta": value, "rope_type": "default"}}


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"sliding_window": 32, "use_sliding_window": True, "layer_types": [SLIDING] * 2}
TAPS = {"target_layer_ids": [1, 3, 5]}
MARKOV = {"markov_rank": MARKOV_RANK, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
SELECTOR = {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 12, "selector_top_k": 4}
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
KIMI = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}


def _dflash(base: Config) -> dict[str, Config]:
    """Layouts of z-lab, and alike."""
    three = {"num_hidden_layers": 3, "max_window_layers": 3, "tie_word_embeddings": False}
    sliding = base | WINDOW | three | {"layer_types": [SLIDING, SLIDING, FULL], "is_causal": False}
    sliding = _without(sliding | _theta(10000000), "rope_theta", "rope_scaling", "block_size")
    swa = {"partial_rotary_factor": 0.5, "v_head_dim": HEAD_DIM, "block_size": 8}
    swa = base | swa | {"sliding_window": 24, "rope_theta": 10000}
    kimi = {"factor": 64.0, "original_max_position_embeddings": 4096} | KIMI
    llama3 = {"factor": 8.0, "original_max_position_embeddings": 8192} | LLAMA3
    gpt_oss = {"attention_bias": True, "block_size": 8, "rms_norm_eps": 1e-05}
    gpt_oss |= {"initial_context_length": 4096, "max_position_embeddings": 131072}
    two = base | WINDOW | _theta(500000.0) | {"is_causal": False, "tie_word_embeddings": False}
    return {
        "plain": base,  # z-lab/Qwen3-8B-DFlash-b16
        "sliding": _nested(sliding, block_size=8),  # z-lab/Qwen3.6-27B-DFlash
        "mrope": _nested(sliding, block_size=8),  # told apart by its target
        "swa-sinks": _nested(  # XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash
            _without(swa, "layer_types", "use_sliding_window", "max_window_layers"),
            **{"block_size": 8, "num_anchors": 4096, "loss_decay_gamma": 7.0},
            **{"use_swa": True, "swa_window_size": 24, "backbone_rotary_base": 5000000},
            **{"attention_value_scale": 0.612, "attention_sink_bias": True},
        ),
        # z-lab/Kimi-K2.5-DFlash
        "yarn": base | {"rope_scaling": kimi, "rope_theta": 50000.0},
        # z-lab/gpt-oss-20b-DFlash
        "gpt-oss": base
        | gpt_oss
        | {"model_type": "gpt_oss", "rope_scaling": YARN, "rope_theta": 150000},
        "linear": base | {"rope_scaling": {"factor": 4.0, "rope_type": "linear"}},
        "llama3": base | {"rope_scaling": llama3, "rope_theta": 500000.0},
        "scales": _nested(
            base | {"final_logit_softcapping": 30.0},
            **{"input_embedding_scale": 8.0, "output_multiplier": 0.25, "causal": True},
        ),
        "own-head": base | {"tie_word_embeddings": False},
        "reduced": base | {"draft_vocab_size": REDUCED},
        "dflash2": _nested(  # z-lab/Muse-Glimmer-30B-DFlash2
            _without(two, "rope_theta", "rope_scaling", "block_size", "auto_map")
            | {"architectures": ["DFlash2DraftModel"]},
            **SELECTOR | {"block_size": 8, "final_logit_softcapping": 20.0},
            output_multiplier=0.19611613513818404,
        ),
    }


def _dspark(base: Config, mask: Config) -> dict[str, Config]:
    """Layouts of DeepSeek, LiquidAI and NVIDIA."""
    qwen3 = {"architectures": ["Qwen3DSparkModel"], "block_size": 7}
    dspark = base | qwen3 | mask | TAPS | MARKOV | CONFIDENCE
    dspark = _without(dspark, "dflash_config", "auto_map")
    lfm2 = {"architectures": ["Lfm2DSparkDraftModel"], "block_size": 9, "rms_norm_eps": 1e-05}
    lfm2 |= {"rope_is_neox_style": False, "enable_confidence_head": False}
    sinks = qwen3 | {"block_size": 8, "sliding_window": 24, "layer_types": [SLIDING] * 2}
    sinks |= {"attention_sink_bias": True, "sample_from_anchor": False, "dspark_bonus_anchor": True}
    sinks |= {"dspark_fixup_head_type": "markov", "dspark_markov_rank": MARKOV_RANK}
    sinks |= {"draft_vocab_size": None, "has_embed_tokens": False, "has_lm_head": False}
    sinks |= {"rope_parameters": None, "rope_theta": 10000}
    return {
        "dspark": dspark,  # deepseek-ai/dspark_qwen3_4b_block7
        # deepseek-ai/dflash_qwen3_4b_block7
        "dspark-headless": dspark | {"markov_rank": 0, "enable_confidence_head": False},
        "dspark-interleaved": base | MARKOV | lfm2,  # LiquidAI's Lfm2DSparkDraftModel
        "dspark-sinks": _nested(  # nvidia's drafters for Nemotron
            base | mask | MARKOV | sinks,
            **{"attention_sink_bias": True, "causal": True, "sample_from_anchor": False},
            **{"use_swa": True, "swa_window_size": 24},
        ),
    }


def _speculators(base: Config, mask: Config) -> dict[str, Config]:
    """RedHatAI's *-speculator.dspark, .dflash and .dflash2."""
    layers = _without(base, "architectures", "auto_map", "block_size", "dflash_config")
    layers = _without(layers, "rope_theta", "num_target_layers") | _theta(8000000)

    def published(name: str, architecture: str, **fields: Any) -> Config:
        config = {
            "algorithm": name,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        }
        return {
            "architectures": [architecture],
            "aux_hidden_state_layer_ids": [2, 4, 6],
            "block_size": 8,
            "draft_vocab_size": REDUCED,
            "dtype": "bfloat16",
            "speculators_config": config,
            "speculators_model_type": name,
            "tie_word_embeddings": False,
            "transformer_layer_config": layers,
            **mask,
            **fields,
        }

    both = layers | WINDOW | {"layer_types": [SLIDING, FULL]}
    two = SELECTOR | {"draft_vocab_size": base["vocab_size"], "transformer_layer_config": both}
    inner = {"sample_from_anchor": False, "sliding_window_non_causal": False}
    return {
        "speculators": published(
            "dspark", "DSparkDraftModel", **MARKOV, **CONFIDENCE, max_anchors=1024
        ),
        "speculators-dflash": published("dflash", "DFlashDraftModel", **inner),
        "speculators-dflash2": published(
            "dflash2", "DFlash2DraftModel", **inner | two | {"sliding_window_non_causal": True}
        ),
    }


def _of_other_layers(base: Config, mask: Config) -> dict[str, Config]:
    names = "dtype", "head_dim", "intermediate_size", "hidden_size", "max_position_embeddings"
    names += "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"
    plain = {name: base[name] for name in names} | mask | TAPS
    full = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    local = {"rope_theta": 10000.0, "rope_type": "default"}
    return {
        # deepseek-ai's Gemma4DSparkModel
        "gemma4": _without(plain, "dtype")
        | MARKOV
        | CONFIDENCE
        | {
            "architectures": ["Gemma4DSparkModel"],
            "attention_bias": False,
            "attention_k_eq_v": True,
            "block_size": 7,
            "enable_moe_block": False,
            "final_logit_softcapping": None,
            "global_head_dim": 2 * HEAD_DIM,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [FULL] * 2,
            "model_type": "gemma4_text",
            "num_global_key_value_heads": 1,
            "num_target_layers": N_TARGET_LAYERS,
            "rope_parameters": {"full_attention": full, "sliding_attention": local},
            "sliding_window": 1024,
            "tie_word_embeddings": True,
            "vocab_size": base["vocab_size"],
        },
        # meta-models/Muse-Glimmer-30B-assistant
        "muse-glimmer": plain
        | _theta(500000.0)
        | {
            "architectures": ["MuseGlimmerAssistantModel"],
            "attention_dropout": 0.0,
            "block_size": 16,
            "hidden_act": "silu",
            "layer_types": [SLIDING] * 2,
            "model_type": "muse_glimmer_assistant",
            "rms_norm_eps": 1e-05,
            "sliding_window": 32,
        },
    }


def _variants(n_embd: int, n_vocab: int) -> dict[str, Config]:
    base, mask = _qwen3(n_embd, n_vocab), {"mask_token_id": n_vocab - 1}
    others = _speculators(base, mask) | _of_other_layers(base, mask)
    return _dflash(base) | _dspark(base, mask) | others


VARIANTS = tuple(_variants(64, 256))


def config(name: str, *, n_embd: int = 64, n_vocab: int = 256) -> Config:
    """The config.json of the variant `name`."""
    return _variants(n_embd, n_vocab)[name]


def target_facts(name: str, *, n_embd: int = 64, n_vocab: int = 256) -> TargetFacts:
    """The target of the variant `name`, as far as a drafter depends on it."""
    if name == "mrope":
        return TargetFacts("qwen35", N_TARGET_LAYERS, n_embd, n_vocab, uses_mrope=True)
    return TargetFacts("qwen3", N_TARGET_LAYERS, n_embd, n_vocab)
