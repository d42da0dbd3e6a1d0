"""What the two files of a shape hold: keys as llama.cpp reads them, a vocabulary, and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gguf import GGUFValueType, TokenType

from dflash_local.bench.shapes.shape import Shape
from dflash_local.bench.shapes.tensors import (
    QUANTS,
    Quant,
    TensorSpec,
    drafter_tensors,
    find_quant,
    target_tensors,
)
from dflash_local.errors import InputError

DEFAULT_DRAFTER_QUANT = "Q8_0"

END, START, FINISH, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class KeySpec:
    """A key with its GGUF type; `element` is the type of an array's elements."""

    name: str
    value: Any
    type: GGUFValueType
    element: GGUFValueType | None = None


@dataclass(frozen=True)
class ShapeFile:
    """One file to write. `std` is the standard deviation of its random weights."""

    name: str
    architecture: str
    keys: tuple[KeySpec, ...]
    tensors: tuple[TensorSpec, ...]
    std: float


def target_file(shape: Shape, quant: str) -> ShapeFile:
    """The target. Raises InputError for a quant that is unknown or not for this shape."""
    types = find_quant(quant)
    if types.experts and not shape.experts:
        raise InputError(
            f"{quant} is for mixtures of experts, and {shape.name} is none; expected "
            + ", ".join(name for name, each in QUANTS.items() if not each.experts)
        )
    return ShapeFile(
        f"{shape.name}-{quant.lower()}.gguf",
        shape.architecture,
        (*_target_keys(shape, types), *_vocabulary(shape.n_vocab, shape.pre_tokenizer)),
        target_tensors(shape, types),
        shape.n_embd**-0.5,
    )


def drafter_file(shape: Shape, quant: str) -> ShapeFile:
    """The drafter. Raises InputError for an unknown quant."""
    types = find_quant(quant)
    if types.experts:
        raise InputError(f"{quant} is for mixtures of experts; expected another for the drafter")
    return ShapeFile(
        f"{shape.name}-dflash-{quant.lower()}.gguf",
        "dflash",
        (*_drafter_keys(shape, types), *_vocabulary(shape.n_vocab, shape.pre_tokenizer)),
        drafter_tensors(shape, types),
        shape.n_embd**-0.5,
    )


# Keys


def _target_keys(shape: Shape, quant: Quant) -> list[KeySpec]:
    prefix = shape.architecture
    keys = _common_keys(
        prefix,
        f"{shape.name}, random weights",
        quant,
        n_layer=shape.n_layer,
        n_ff=shape.n_ff,
        shape=shape,
        heads=(shape.n_head, shape.n_head_kv, shape.head_dim),
        rope_base=shape.rope_base,
    )
    keys.append(_u32(f"{prefix}.rope.dimension_count", shape.head_dim))
    if shape.experts:
        keys += [
            _u32(f"{prefix}.expert_count", shape.experts.n),
            _u32(f"{prefix}.expert_used_count", shape.experts.n_used),
            _u32(f"{prefix}.expert_feed_forward_length", shape.experts.n_ff),
        ]
    if prefix == "gpt-oss":
        keys += [
            _u32(f"{prefix}.attention.sliding_window", 128),
            _text(f"{prefix}.rope.scaling.type", "yarn"),
            _f32(f"{prefix}.rope.scaling.factor", 32.0),
            _u32(f"{prefix}.rope.scaling.original_context_length", 4096),
        ]
    return [*keys, _text("tokenizer.chat_template", _TEMPLATE)]


def _drafter_keys(shape: Shape, quant: Quant) -> list[KeySpec]:
    drafter = shape.drafter
    keys = _common_keys(
        "dflash",
        f"DFlash drafter for {shape.name}, random weights",
        quant,
        n_layer=drafter.n_layer,
        n_ff=drafter.n_ff,
        shape=shape,
        heads=(drafter.n_head, drafter.n_head_kv, drafter.head_dim),
        rope_base=drafter.rope_base,
    )
    return [
        *keys,
        _u32("dflash.block_size", drafter.block_size),
        KeySpec("dflash.target_layers", list(shape.taps), GGUFValueType.ARRAY, GGUFValueType.INT32),
        _u32("tokenizer.ggml.mask_token_id", shape.n_vocab - 1),
    ]


def _common_keys(
    prefix: str,
    title: str,
    quant: Quant,
    *,
    n_layer: int,
    n_ff: int,
    shape: Shape,
    heads: tuple[int, int, int],
    rope_base: float,
) -> list[KeySpec]:
    n_head, n_head_kv, head_dim = heads
    return [
        _text("general.type", "model"),
        _text("general.name", title),
        _u32("general.file_type", quant.file_type),
        _u32("general.quantization_version", 2),
        _u32(f"{prefix}.block_count", n_layer),
        _u32(f"{prefix}.context_length", shape.context_length),
        _u32(f"{prefix}.embedding_length", shape.n_embd),
        _u32(f"{prefix}.feed_forward_length", n_ff),
        _u32(f"{prefix}.attention.head_count", n_head),
        _u32(f"{prefix}.attention.head_count_kv", n_head_kv),
        _u32(f"{prefix}.attention.key_length", head_dim),
        _u32(f"{prefix}.attention.value_length", head_dim),
        _f32(f"{prefix}.attention.layer_norm_rms_epsilon", shape.rms_eps),
        _f32(f"{prefix}.rope.freq_base", rope_base),
    ]


def _u32(name: str, value: int) -> KeySpec:
    return KeySpec(name, value, GGUFValueType.UINT32)


def _f32(name: str, value: float) -> KeySpec:
    return KeySpec(name, value, GGUFValueType.FLOAT32)


def _text(name: str, value: str) -> KeySpec:
    return KeySpec(name, value, GGUFValueType.STRING)


# Vocabulary


@lru_cache(maxsize=1)
def _vocabulary(n_vocab: int, pre_tokenizer: str) -> tuple[KeySpec, ...]:
    """A byte-level BPE that tokenizes any text: 256 bytes, one merge, then words that no text has,
    up to the size of the real vocabulary; the last four are special."""
    special = [END, START, FINISH, MASK]
    tokens = [*_byte_characters(), "\u0120\u0120"]
    n_words = n_vocab - len(tokens) - len(special)
    if n_words < 0:
        raise InputError(f"a vocabulary of {n_vocab}; expected at least {n_vocab - n_words}")
    tokens += [f"[{i:x}]" for i in range(n_words)]
    kinds = [int(TokenType.NORMAL)] * len(tokens) + [int(TokenType.CONTROL)] * len(special)
    array, string = GGUFValueType.ARRAY, GGUFValueType.STRING
    return (
        _text("tokenizer.ggml.model", "gpt2"),
        _text("tokenizer.ggml.pre", pre_tokenizer),
        KeySpec("tokenizer.ggml.tokens", tokens + special, array, string),
        KeySpec("tokenizer.ggml.token_type", kinds, array, GGUFValueType.INT32),
        KeySpec("tokenizer.ggml.merges", ["\u0120 \u0120"], array, string),
        _u32("tokenizer.ggml.bos_token_id", n_vocab - 4),
        _u32("tokenizer.ggml.eos_token_id", n_vocab - 2),
        _u32("tokenizer.ggml.padding_token_id", n_vocab - 4),
        KeySpec("tokenizer.ggml.add_bos_token", False, GGUFValueType.BOOL),
    )


def _byte_characters() -> list[str]:
    """The printable character of each byte in a byte-level BPE (GPT-2's table), by byte."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]
