"""GGUF files with random weights: qwen3 targets and dflash drafters of any shape, for tests.

The weights are scaled so that activations stay O(1), attention is selective and the drafts differ
from position to position: an error anywhere in a graph then shows in its output.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

LOGIT_STD = 2.0
"""Standard deviation, in nats, of the logits that a random output head gives."""

EOS, MASK = "<|endoftext|>", "<|mask|>"

Weights = NDArray[np.float32]


@dataclass(frozen=True)
class Markov:
    """The heads of DSpark."""

    rank: int = 8
    confidence: bool = True
    sample_from_anchor: bool | None = None
    """None leaves the key out."""


@dataclass(frozen=True)
class Selector:
    """The path selector and the convolutions of DFlash 2."""

    rank: int = 8
    top_k: int = 5
    kernel_size: int = 3
    group_size: int = 16


def write_target(
    path: str | Path,
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 16,
    n_vocab: int = 320,
    n_ff: int = 128,
    quant: str = "F32",
    tied: bool = True,
    context_length: int = 4096,
    seed: int = 0,
) -> Path:
    """Write a qwen3 target; `quant` names the ggml type of its matrices, `tied` drops `output`."""
    draw = _Random(seed, quant)
    writer = GGUFWriter(path, "qwen3")
    _write_shape(writer, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, context_length)
    writer.add_rope_freq_base(1e6)
    _write_vocabulary(writer, n_vocab)
    draw.head(writer, "token_embd.weight", n_vocab, n_embd)
    if not tied:
        draw.head(writer, "output.weight", n_vocab, n_embd)
    draw.norm(writer, "output_norm.weight", n_embd)
    for layer in range(n_layer):
        _write_layer(writer, draw, layer, n_embd, n_head, n_head_kv, head_dim, n_ff)
    return _finish(writer, path)


def write_drafter(
    path: str | Path,
    target_path: str | Path,
    *,
    n_layer: int = 2,
    target_layers: Sequence[int] = (1,),
    block_size: int = 8,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 16,
    n_ff: int = 128,
    quant: str = "F32",
    mixed: Mapping[str, str] | None = None,
    sliding_window: int = 0,
    pattern: Sequence[bool] | None = None,
    own_head: bool = False,
    own_embeddings: bool = False,
    post_norms: bool = False,
    layer_scale: bool = False,
    biases: Sequence[str] = (),
    sinks: bool = False,
    scales: bool = False,
    shared_kv: bool = False,
    rope_dimensions: int | None = None,
    rope_factors: bool = False,
    markov: Markov | None = None,
    selector: Selector | None = None,
    reduced_vocabulary: int = 0,
    context_length: int = 4096,
    extra: Mapping[str, float | str | bool] | None = None,
    seed: int = 1,
) -> Path:
    """Write a drafter for the target at `target_path`, whose width and vocabulary it takes over.

    `mixed` gives matrices of these names another type than `quant`.
    `pattern` says which layers have the sliding window (all of them when left out). The other
    options add the optional tensors of the `dflash` architecture, `extra` its optional keys,
    named without the leading `dflash.`; `biases` names the projections of the attention that have
    one ("q", "k", "v", "output", or "1.q" in layer 1 only), which llama.cpp does not know.
    `reduced_vocabulary` is the number of tokens that the own head knows; 0 = all. `scales` puts a
    factor beside each matrix of a product.
    """
    target = gguf.GGUFReader(target_path)
    target_arch = _scalar(target, "general.architecture")
    n_embd = int(_scalar(target, f"{target_arch}.embedding_length"))
    n_vocab = len(target.fields["tokenizer.ggml.tokens"].data)
    draw = _Random(seed, quant, mixed)
    writer = GGUFWriter(path, "dflash")
    _write_shape(writer, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, context_length)
    writer.add_uint32("dflash.block_size", block_size)
    _add_array(writer, "dflash.target_layers", list(target_layers), GGUFValueType.INT32)
    if sliding_window:
        windowed = list(pattern) if pattern is not None else [True] * n_layer
        writer.add_sliding_window(sliding_window)
        _add_array(writer, "dflash.attention.sliding_window_pattern", windowed, GGUFValueType.BOOL)
    if rope_dimensions is not None:
        writer.add_rope_dimension_count(rope_dimensions)
    keys = {"rope.freq_base": 1e6} | _head_keys(markov, selector) | dict(extra or {})
    for key, value in keys.items():
        _add_scalar(writer, f"dflash.{key}", value)
    for field in target.fields.values():
        if field.name.startswith("tokenizer."):
            _copy_field(writer, field)
    if "tokenizer.ggml.mask_token_id" not in target.fields:
        writer.add_mask_token_id(n_vocab - 1)

    draw.matrix(writer, "fc.weight", n_embd, n_embd * len(target_layers))
    draw.norm(writer, "enc.output_norm.weight", n_embd)
    draw.norm(writer, "output_norm.weight", n_embd)
    if own_embeddings:
        draw.head(writer, "token_embd.weight", n_vocab, n_embd)
    n_rows = reduced_vocabulary or n_vocab
    if own_head or reduced_vocabulary:
        draw.head(writer, "output.weight", n_rows, n_embd)
    if reduced_vocabulary:
        known = np.sort(np.argsort(draw.uniform("d2t", n_vocab))[:n_rows])
        writer.add_tensor("d2t", known.astype(np.int64))
    if markov:
        _write_markov(writer, draw, markov, n_embd, n_vocab, n_rows)
    if selector:
        _write_selector(writer, draw, selector, n_embd, n_vocab, n_layer)
    if scales:
        draw.scale(writer, "fc.scale")
        for name, there in (("output", own_head or reduced_vocabulary), ("markov_w2", markov)):
            if there:
                draw.scale(writer, name + ".scale")
    if rope_factors:
        factors = 1.0 + 3.0 * draw.uniform("rope_freqs.weight", head_dim // 2)
        writer.add_tensor("rope_freqs.weight", factors)
    for layer in range(n_layer):
        _write_layer(writer, draw, layer, n_embd, n_head, n_head_kv, head_dim, n_ff, shared_kv)
        block = f"blk.{layer}."
        widths = {"q": n_head, "k": n_head_kv, "v": n_head_kv}
        for name in (b.removeprefix(f"{layer}.") for b in biases):
            if name[0].isdigit():
                continue
            n = widths[name] * head_dim if name in widths else n_embd
            draw.bias(writer, f"{block}attn_{name}.bias", n)
        if post_norms:
            draw.norm(writer, block + "post_attention_norm.weight", n_embd)
            draw.norm(writer, block + "post_ffw_norm.weight", n_embd)
        if layer_scale:
            scale = 0.5 + draw.uniform(block + "layer_output_scale.weight", 1)
            writer.add_tensor(block + "layer_output_scale.weight", scale)
        if scales:
            parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
            for part in parts:
                if not (shared_kv and part == "attn_v"):
                    draw.scale(writer, f"{block}{part}.scale")
        if sinks:
            sink = 4.0 * draw.uniform(block + "attn_sinks.weight", n_head)
            writer.add_tensor(block + "attn_sinks.weight", sink)
    return _finish(writer, path)


class _Random:
    """Random tensors; each depends on the seed and its own name only, not on the order."""

    def __init__(self, seed: int, quant: str, mixed: Mapping[str, str] | None = None) -> None:
        self._seed, self._quant, self._mixed = seed, quant, mixed or {}

    def uniform(self, name: str, n: int) -> Weights:
        return self._generator(name).random(n, dtype=np.float32)

    def matrix(self, writer: GGUFWriter, name: str, n_out: int, n_in: int, gain: float = 1) -> None:
        values = self._generator(name).standard_normal((n_out, n_in), dtype=np.float32)
        values *= np.float32(gain / np.sqrt(n_in))
        kind = GGMLQuantizationType[self._mixed.get(name, self._quant)]
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    def head(self, writer: GGUFWriter, name: str, n_vocab: int, n_embd: int) -> None:
        self.matrix(writer, name, n_vocab, n_embd, gain=LOGIT_STD)

    def norm(self, writer: GGUFWriter, name: str, n: int, mean: float = 1) -> None:
        values = mean + 0.2 * self._generator(name).standard_normal(n, dtype=np.float32)
        writer.add_tensor(name, values.astype(np.float32))

    def scale(self, writer: GGUFWriter, name: str) -> None:
        writer.add_tensor(name, 0.5 + self.uniform(name, 1))

    def bias(self, writer: GGUFWriter, name: str, n: int) -> None:
        """As large as what it is added to."""
        writer.add_tensor(name, self._generator(name).standard_normal(n, dtype=np.float32))

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])


def quantize(values: Weights, kind: GGMLQuantizationType) -> NDArray[Any]:
    """`values` (rows, columns) in a ggml type; by ggml itself where `gguf` only reads the type."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = values.shape[1]
    if columns % block:
        raise ValueError(f"rows of {columns} do not divide into {kind.name} blocks of {block}")
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return _quantize_in_ggml(values, kind, columns // block * n_bytes)


def _quantize_in_ggml(
    values: Weights, kind: GGMLQuantizationType, bytes_per_row: int
) -> NDArray[np.uint8]:
    from llama_cpp._ggml import libggml

    chunk = libggml.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
    rows, columns = values.shape
    source = np.ascontiguousarray(values, dtype=np.float32)
    packed = np.empty((rows, bytes_per_row), dtype=np.uint8)
    written = chunk(int(kind), source.ctypes.data, packed.ctypes.data, 0, rows, columns, None)
    if written != packed.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {kind.name}, not {packed.nbytes}")
    return packed


def _write_shape(
    writer: GGUFWriter,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_ff: int,
    context_length: int,
) -> None:
    writer.add_block_count(n_layer)
    writer.add_context_length(context_length)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)


def _write_layer(
    writer: GGUFWriter,
    draw: _Random,
    layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_ff: int,
    shared_kv: bool = False,
) -> None:
    block = f"blk.{layer}."
    draw.norm(writer, block + "attn_norm.weight", n_embd)
    draw.matrix(writer, block + "attn_q.weight", n_head * head_dim, n_embd)
    draw.matrix(writer, block + "attn_k.weight", n_head_kv * head_dim, n_embd)
    if not shared_kv:
        draw.matrix(writer, block + "attn_v.weight", n_head_kv * head_dim, n_embd)
    draw.matrix(writer, block + "attn_output.weight", n_embd, n_head * head_dim, gain=2)
    # Scores of standard deviation mean^2: selective, yet no row takes all the weight.
    draw.norm(writer, block + "attn_q_norm.weight", head_dim, mean=1.4)
    draw.norm(writer, block + "attn_k_norm.weight", head_dim, mean=1.4)
    draw.norm(writer, block + "ffn_norm.weight", n_embd)
    draw.matrix(writer, block + "ffn_gate.weight", n_ff, n_embd, gain=2)
    draw.matrix(writer, block + "ffn_up.weight", n_ff, n_embd)
    draw.matrix(writer, block + "ffn_down.weight", n_embd, n_ff)


def _head_keys(markov: Markov | None, selector: Selector | None) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if markov and markov.sample_from_anchor is not None:
        keys["sample_from_anchor"] = markov.sample_from_anchor
    if selector:
        keys["selector_rank"] = selector.rank
        keys["selector_top_k"] = selector.top_k
        keys["conv_kernel_size"] = selector.kernel_size
        keys["conv_group_size"] = selector.group_size
    return keys


def _write_markov(
    writer: GGUFWriter, draw: _Random, markov: Markov, n_embd: int, n_vocab: int, n_rows: int
) -> None:
    draw.matrix(writer, "markov_w1.weight", n_vocab, markov.rank, gain=2)
    draw.matrix(writer, "markov_w2.weight", n_rows, markov.rank, gain=2)
    if markov.confidence:
        draw.matrix(writer, "conf_proj.weight", 1, n_embd + markov.rank)
        writer.add_tensor("conf_proj.bias", draw.uniform("conf_proj.bias", 1))


def _write_selector(
    writer: GGUFWriter, draw: _Random, selector: Selector, n_embd: int, n_vocab: int, n_layer: int
) -> None:
    # Scores of steps then vary about as much as the logits of the best candidates.
    for name in ("predecessor", "successor"):
        draw.matrix(writer, f"selector_{name}.weight", n_vocab, selector.rank, gain=2)
    draw.matrix(writer, "selector_hidden.weight", selector.rank, n_embd)
    n_kernels = 2 * selector.kernel_size * (n_embd // selector.group_size)
    for layer in range(n_layer):
        for part in ("attn", "ffn"):
            name = f"blk.{layer}.{part}_conv_"
            base = draw.uniform(name + "base", 2 * selector.kernel_size * n_embd) - 0.5
            base = base.reshape(2, selector.kernel_size, n_embd)
            base[:, 0] += 1  # a row is mostly itself
            writer.add_tensor(name + "base", base)
            draw.matrix(writer, name + "proj.weight", n_kernels, n_embd, gain=0.3)


def _write_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """A byte-level BPE: 256 bytes, one merge, then unused tokens up to end of text and mask."""
    tokens = [*_byte_characters(), "\u0120\u0120"]
    n_unused = n_vocab - len(tokens) - 2
    if n_unused < 0:
        raise ValueError(f"n_vocab is {n_vocab}, the least is {n_vocab - n_unused}")
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * n_unused
    tokens += [f"[unused{i}]" for i in range(n_unused)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, EOS, MASK])
    writer.add_token_types([*kinds, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL])
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_eos_token_id(n_vocab - 2)
    writer.add_add_bos_token(False)


def _byte_characters() -> list[str]:
    """The printable character of each byte in a byte-level BPE (GPT-2's table), by byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept}
    table |= {byte: chr(256 + index) for index, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]


def _finish(writer: GGUFWriter, path: str | Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _scalar(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _copy_field(writer: GGUFWriter, field: gguf.ReaderField) -> None:
    sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)


def _add_array(writer: GGUFWriter, key: str, values: list[Any], kind: GGUFValueType) -> None:
    writer.add_key_value(key, values, GGUFValueType.ARRAY, sub_type=kind)


def _add_scalar(writer: GGUFWriter, key: str, value: float | str | bool) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_float32(key, value)
