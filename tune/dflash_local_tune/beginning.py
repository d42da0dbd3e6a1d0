"""A drafter before its training: the config for a target, and random weights.

The layout is that of DSpark's drafters (`DSparkDraftModel`), so the converter makes the GGUF file
and a trained checkpoint is what it takes anywhere. Embeddings and output head stay the target's
own.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_local.convert import convert
from dflash_local.convert.files.checkpoint import SINGLE_NAME
from dflash_local.convert.files.source import CONFIG
from dflash_local.errors import InputError
from dflash_local.fit.pairing import check_target
from dflash_local.gguf.file import GgufFile

MOST_TAPS = 5
_FEW_LAYERS, _MANY_LAYERS = 4, 5
_SHORT_BLOCK, _LONG_BLOCK = 8, 16
_WIDE = 1024
"""From this hidden size on a drafter gets a layer more and longer blocks; a smaller target is so
fast itself that a layer costs more than it gains, and of the last positions of a long block next to
nothing is accepted."""
_NARROW_RANK, _WIDE_RANK = 32, 256
"""Of the Markov head. Its two tables take as much of a small target's drafter as the layers do;
wide ones get the rank of the published drafters."""
_STD = 0.02
_EPSILON = 1e-6
_UNUSED, _CONTROL = 5, 3
"""Kinds of tokens, as `tokenizer.ggml.token_type` has them."""
_MOST_LOOKED_AT = 64


def write_beginning(
    folder: Path,
    target: Path,
    *,
    begin: Path | None = None,
    block_size: int | None = None,
    n_layer: int | None = None,
    seed: int = 0,
) -> Path:
    """Write a checkpoint and its GGUF file, which is returned, into a new folder. `begin`: the
    folder of a checkpoint to begin with in place of random weights; its blocks may get another
    size, as no weight depends on it. Raises InputError."""
    file = GgufFile.open(target)
    check_target(file)
    folder.mkdir()
    if begin is None:
        config = config_for(file, block_size=block_size, n_layer=n_layer)
        tensors = random_weights(config, file, seed)
    else:
        config, tensors = _checkpoint(begin)
        config["block_size"] = block_size or config["block_size"]
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    place = folder / "drafter.gguf"
    convert(folder, target=target, output=place)
    return place


def _checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a checkpoint in one file. Raises InputError."""
    what = CONFIG
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        what = SINGLE_NAME
        return config, load_file(folder / SINGLE_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"{folder}: no checkpoint to begin with: {what}: {error}; give a folder that this "
            "command has written"
        ) from None


def config_for(target: GgufFile, *, block_size: int | None, n_layer: int | None) -> dict[str, Any]:
    """The config.json of a drafter for a target, of the target's width and with heads like its
    own."""
    name = target.architecture
    n_embd = target.require(f"{name}.embedding_length", int)
    n_target = target.require(f"{name}.block_count", int)
    n_layer = n_layer or (_MANY_LAYERS if n_embd >= _WIDE else _FEW_LAYERS)
    n_head = target.largest("attention.head_count") or max(1, n_embd // 64)
    head_dim = target.largest("attention.key_length") or n_embd // n_head
    n_head_kv = target.largest("attention.head_count_kv")
    if not n_head_kv or n_head % n_head_kv:
        n_head_kv = n_head
    if head_dim % 2 or head_dim > 256:
        head_dim, n_head, n_head_kv = 128, max(1, n_embd // 128), max(1, n_embd // 512)
    softcap = target.get(f"{name}.final_logit_softcapping")
    return {
        "architectures": ["DSparkDraftModel"],
        "attention_bias": False,
        "block_size": block_size or (_LONG_BLOCK if n_embd >= _WIDE else _SHORT_BLOCK),
        "dflash_config": {
            "mask_token_id": mask_token(target),
            "target_layer_ids": tapped(n_target),
            **({"final_logit_softcapping": softcap} if softcap else {}),
        },
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": n_embd,
        "intermediate_size": 2 * n_embd,  # in place of the target's: room for the Markov head
        "layer_types": ["full_attention"] * n_layer,
        "markov_rank": _WIDE_RANK if n_embd >= _WIDE else _NARROW_RANK,
        "max_position_embeddings": target.get(f"{name}.context_length") or 4096,
        "model_type": "qwen3",
        "num_attention_heads": n_head,
        "num_hidden_layers": n_layer,
        "num_key_value_heads": n_head_kv,
        "num_target_layers": n_target,
        "rms_norm_eps": _EPSILON,
        "rope_scaling": None,
        "rope_theta": target.get(f"{name}.rope.freq_base") or 10000.0,
        "sample_from_anchor": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": target.n_vocab,
    }


def tapped(n_target: int) -> list[int]:
    """The layers whose output is tapped, spread over the depth from the second to the last but two,
    as DFlash's are."""
    last = max(0, n_target - 3 if n_target > 4 else n_target - 2)
    first = min(1, last)
    n = min(MOST_TAPS, last - first + 1)
    return [first + round(i * (last - first) / max(1, n - 1)) for i in range(n)]


def mask_token(target: GgufFile) -> int:
    """A token that no text has: an unused one, else a control token that ends nothing, if possible
    the last one. Its embedding must not be zero, for then the first layer would see nothing."""
    kinds = target.get("tokenizer.ggml.token_type") or []
    known = {
        target.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "unknown")
    }
    named = target.get("tokenizer.ggml.mask_token_id")
    template = str(target.get("tokenizer.chat_template") or "")
    names = target.get("tokenizer.ggml.tokens") or []
    found = [
        token
        for kind in (_CONTROL, _UNUSED)
        for token in (i for i, each in enumerate(kinds) if each == kind)
        if token not in known and str(names[token]) not in template
    ]
    if isinstance(named, int):
        found.append(named)
    padding = target.get("tokenizer.ggml.padding_token_id")
    spare = padding if isinstance(padding, int) else (target.n_vocab or 1) - 1
    if not found:
        return spare
    last = reversed(found[-_MOST_LOOKED_AT:])
    table = "token_embd.weight"
    return next((each for each in last if target.rows(table, each, each + 1).any()), spare)


def random_weights(config: dict[str, Any], target: GgufFile, seed: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names. Weights into the residual stream begin smaller
    the more layers there are; the last norm is the target's, which its output head expects. The
    Markov head adds nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    n_embd, n_ff = config["hidden_size"], config["intermediate_size"]
    n_layer, head_dim = config["num_hidden_layers"], config["head_dim"]
    n_q = config["num_attention_heads"] * head_dim
    n_kv = config["num_key_value_heads"] * head_dim
    n_taps = len(config["dflash_config"]["target_layer_ids"])

    def matrix(n_out: int, n_in: int, std: float = _STD) -> Tensor:
        values = torch.randn(n_out, n_in, generator=generator) * std
        return values.to(torch.bfloat16)

    small = _STD / math.sqrt(2 * n_layer)
    n_vocab, rank = config["vocab_size"], config["markov_rank"]
    found = {
        "markov_head.markov_w1.weight": matrix(n_vocab, rank, 1 / math.sqrt(rank)),
        "markov_head.markov_w2.weight": torch.zeros(n_vocab, rank),
        "fc.weight": matrix(n_embd, n_taps * n_embd),
        "hidden_norm.weight": torch.ones(n_embd),
        "norm.weight": torch.ones(n_embd),
    }
    if "output_norm.weight" in target.tensors:
        found["norm.weight"] = torch.from_numpy(target.rows("output_norm.weight", 0, 1)[0])
    for i in range(n_layer):
        layer = f"layers.{i}."
        found |= {
            f"{layer}self_attn.q_proj.weight": matrix(n_q, n_embd),
            f"{layer}self_attn.k_proj.weight": matrix(n_kv, n_embd),
            f"{layer}self_attn.v_proj.weight": matrix(n_kv, n_embd),
            f"{layer}self_attn.o_proj.weight": matrix(n_embd, n_q, small),
            f"{layer}self_attn.q_norm.weight": torch.ones(head_dim),
            f"{layer}self_attn.k_norm.weight": torch.ones(head_dim),
            f"{layer}mlp.gate_proj.weight": matrix(n_ff, n_embd),
            f"{layer}mlp.up_proj.weight": matrix(n_ff, n_embd),
            f"{layer}mlp.down_proj.weight": matrix(n_embd, n_ff, small),
            f"{layer}input_layernorm.weight": torch.ones(n_embd),
            f"{layer}post_attention_layernorm.weight": torch.ones(n_embd),
        }
    return {name: value.to(torch.bfloat16) for name, value in found.items()}
