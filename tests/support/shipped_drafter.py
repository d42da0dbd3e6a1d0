"""The tiny drafter as its makers would publish it: config.json and safetensors."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from gguf import quants

import tiny_coder
from dflash_local.gguf.file import GgufFile
from gguf_files import parts
from hf_drafters import write_safetensors

GLOBALS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
}
LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def config() -> dict[str, Any]:
    """Its config.json."""
    data = GgufFile.open(tiny_coder.pair()[1]).metadata
    n_layer = data["dflash.block_count"]
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": data["dflash.block_size"],
        "dflash_config": {
            "mask_token_id": data["tokenizer.ggml.mask_token_id"],
            # the layers whose outputs are tapped
            "target_layer_ids": [layer - 1 for layer in data["dflash.target_layers"]],
        },
        "head_dim": data["dflash.attention.key_length"],
        "hidden_act": "silu",
        "hidden_size": data["dflash.embedding_length"],
        "intermediate_size": data["dflash.feed_forward_length"],
        "layer_types": ["full_attention"] * n_layer,
        "max_position_embeddings": data["dflash.context_length"],
        "model_type": "qwen3",
        "num_attention_heads": data["dflash.attention.head_count"],
        "num_hidden_layers": n_layer,
        "num_key_value_heads": data["dflash.attention.head_count_kv"],
        "num_target_layers": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": data["dflash.rope.freq_base"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": len(data["tokenizer.ggml.tokens"]),
    }


def write(folder: Path) -> Path:
    """Write it into `folder`, weights in F32: these give the stored Q8_0 again."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", _tensors())
    return folder


@cache
def _tensors() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, (data, kind) in parts(tiny_coder.pair()[1])[1].items():
        values = quants.dequantize(data, kind)
        found[_hf_name(name)] = ("F32", values.shape, values.astype("<f4").tobytes())
    return found


def _hf_name(name: str) -> str:
    if name in GLOBALS:
        return GLOBALS[name]
    _, layer, part, _ = name.split(".")
    return f"layers.{layer}.{LAYERS[part]}.weight"
