"""Tiny random drafters in the layouts in which real ones are published.

`write(folder, name)` writes config.json and model.safetensors as on the Hugging Face hub.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_configs import (
    HEAD_DIM,
    MARKOV_RANK,
    N_FF,
    N_HEAD,
    N_HEAD_KV,
    REDUCED,
    VARIANTS,
    config,
    target_facts,
)

__all__ = ["VARIANTS", "config", "target_facts", "weights", "write", "write_safetensors"]

Shapes = dict[str, tuple[int, ...]]


def shapes(name: str, *, n_embd: int = 64, n_vocab: int = 256) -> Shapes:
    """Names and shapes of the tensors in the checkpoint of the variant `name`."""
    raw = config(name, n_embd=n_embd, n_vocab=n_vocab)
    layers = raw.get("transformer_layer_config", raw)
    encoder = "encoder." if name == "muse-glimmer" else ""
    hidden_norm = "encoder.output_norm_enc" if encoder else "hidden_norm"
    found: Shapes = {
        f"{encoder}fc.weight": (n_embd, 3 * n_embd),
        f"{hidden_norm}.weight": (n_embd,),
        "norm.weight": (n_embd,),
    }
    if name == "own-head":
        found |= {"embed_tokens.weight": (n_vocab, n_embd), "lm_head.weight": (n_vocab, n_embd)}
    if name in ("reduced", "speculators", "speculators-dflash"):
        found |= {"lm_head.weight": (REDUCED, n_embd), "d2t": (REDUCED,), "t2d": (n_vocab,)}
    if name == "speculators-dflash2":
        found["lm_head.weight"] = (n_vocab, n_embd)
    if name.startswith("speculators") or name == "gemma4":
        found["embed_tokens.weight"] = (n_vocab, n_embd)
    if raw.get("markov_rank"):
        rows = REDUCED if name == "speculators" else n_vocab
        found["markov_head.markov_w1.weight"] = (n_vocab, MARKOV_RANK)
        found["markov_head.markov_w2.weight"] = (rows, MARKOV_RANK)
    if raw.get("enable_confidence_head"):
        head = "confidence_proj" if name == "gemma4" else "confidence_head.proj"
        found[f"{head}.weight"] = (1, n_embd + MARKOV_RANK)
        found[f"{head}.bias"] = (1,)
    if name.endswith("dflash2"):
        found |= {
            "candidate_selector.predecessor_codebook": (n_vocab, 12),
            "candidate_selector.successor_codebook": (n_vocab, 12),
            "candidate_selector.hidden_projection.weight": (12, n_embd),
        }
    for layer in range(layers["num_hidden_layers"]):
        found |= {f"layers.{layer}.{key}": shape for key, shape in _layer(name, n_embd).items()}
    return found


def _layer(name: str, n_embd: int) -> Shapes:
    head_dim, n_kv = (2 * HEAD_DIM, 1) if name == "gemma4" else (HEAD_DIM, N_HEAD_KV)
    found: Shapes = {
        "input_layernorm.weight": (n_embd,),
        "mlp.down_proj.weight": (n_embd, N_FF),
        "mlp.gate_proj.weight": (N_FF, n_embd),
        "mlp.up_proj.weight": (N_FF, n_embd),
        "post_attention_layernorm.weight": (n_embd,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.k_proj.weight": (n_kv * head_dim, n_embd),
        "self_attn.o_proj.weight": (n_embd, N_HEAD * head_dim),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.q_proj.weight": (N_HEAD * head_dim, n_embd),
    }
    if name == "gemma4":
        found["pre_feedforward_layernorm.weight"] = (n_embd,)
        found["post_feedforward_layernorm.weight"] = (n_embd,)
        found["layer_scalar"] = (1,)
    else:
        found["self_attn.v_proj.weight"] = (n_kv * head_dim, n_embd)
    if name == "gpt-oss":
        found |= {
            f"{projection[: -len('weight')]}bias": shape[:1]
            for projection, shape in found.items()
            if projection.startswith("self_attn.") and projection.endswith("_proj.weight")
        }
    if name in ("swa-sinks", "dspark-sinks"):
        found["self_attn.attention_sink_bias"] = (N_HEAD,)
    if name.endswith("dflash2"):
        for conv in ("attention_conv", "mlp_conv"):
            found[f"{conv}.base_kernel"] = (2, 2, n_embd)
            found[f"{conv}.kernel_projection.weight"] = (2 * 2 * n_embd // 16, n_embd)
    return found


def weights(name: str, *, n_embd: int = 64, n_vocab: int = 256) -> dict[str, NDArray[Any]]:
    """Random tensors of the variant `name`: bfloat16 values as float32, `d2t` int64, `t2d` bool."""
    rng = np.random.default_rng(0)
    found: dict[str, NDArray[Any]] = {}
    kept = np.sort(rng.choice(n_vocab, REDUCED, replace=False))
    for key, shape in shapes(name, n_embd=n_embd, n_vocab=n_vocab).items():
        if key == "d2t":
            found[key] = (kept - np.arange(REDUCED)).astype(np.int64)
        elif key == "t2d":
            found[key] = np.isin(np.arange(n_vocab), kept)
        else:
            values = rng.standard_normal(shape, dtype=np.float32)
            # norms lie around 1, so that no layer dies out
            spread = 1 + 0.1 * values if "norm" in key or key.endswith("scalar") else 0.05 * values
            found[key] = as_bfloat16(spread)
    return found


def as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """`values` rounded to the next bfloat16, kept as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept: NDArray[np.float32] = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return kept


def write(
    folder: Path,
    name: str,
    *,
    n_embd: int = 64,
    n_vocab: int = 256,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write the drafter `name` into `folder` and return it; `changes` to the top of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config(name, n_embd=n_embd, n_vocab=n_vocab) | dict(changes or {})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    tensors = weights(name, n_embd=n_embd, n_vocab=n_vocab)
    stored = {key: _stored(values) for key, values in tensors.items()}
    write_safetensors(folder / "model.safetensors", stored)
    return folder


def _stored(values: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    if values.dtype == np.int64:
        return "I64", values.shape, values.astype("<i8").tobytes()
    if values.dtype == np.bool_:
        return "BOOL", values.shape, values.tobytes()
    halves = (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype("<u2")
    return "BF16", values.shape, halves.tobytes()


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """Write tensors given as (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, (dtype, shape, data) in sorted(tensors.items()):
        end = offset + len(data)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (_, _, data) in sorted(tensors.items()):
            file.write(data)
