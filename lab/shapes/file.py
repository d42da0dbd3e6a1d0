"""The two files of a shape: their keys as llama.cpp reads them, a vocabulary, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFWriter, TokenType
from gguf.vocab import bytes_to_unicode

from dflash_local.errors import InputError
from dflash_local.gguf.file import GgufFile
from lab.shapes.shape import DeltaNet, Heads, PairShape
from lab.shapes.tensors import (
    QUANTS,
    Quant,
    TensorSpec,
    drafter_tensors,
    find_quant,
    target_tensors,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ShapeFile:
    """One file to write. `header` holds its keys and can be written once; `std` is the standard
    deviation of the random weights."""

    name: str
    header: GGUFWriter
    tensors: tuple[TensorSpec, ...]
    std: float

    @property
    def n_data(self) -> int:
        """Bytes of all tensors, each padded."""
        return sum(padded(tensor.n_bytes) for tensor in self.tensors)

    def write_header(self, path: Path) -> int:
        """Write keys and tensor infos, padded up to where the weights begin; returns the bytes."""
        for tensor in self.tensors:
            shape = tuple(reversed(tensor.shape))
            self.header.add_tensor_info(
                tensor.name, shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type
            )
        try:
            self.header.write_header_to_file(path)
            self.header.write_kv_data_to_file()
            self.header.write_ti_data_to_file()
        finally:
            self.header.close()
        with path.open("ab") as stream:
            stream.write(bytes(padded(stream.tell()) - stream.tell()))
            return stream.tell()


def padded(n_bytes: int) -> int:
    """Rounded up to the alignment of GGUF."""
    return GGUFWriter.ggml_pad(n_bytes, gguf.GGUF_DEFAULT_ALIGNMENT)


def target_file(shape: PairShape, quant: str) -> ShapeFile:
    """The target. Raises InputError for a quantisation that is unknown or not for this shape."""
    types = find_quant(quant)
    if types.experts and not shape.experts:
        raise InputError(
            f"{quant} is for mixtures of experts, and {shape.name} is none; expected "
            + ", ".join(name for name, each in QUANTS.items() if not each.experts)
        )
    title = f"{shape.name}, random weights"
    layers = shape.n_layer + shape.n_further, shape.n_ff
    conv, n_kv = shape.short_conv, shape.heads.n_kv
    # llama.cpp knows a layer without attention by its heads.
    of_layers = [n_kv * (not conv.is_recurrent(i)) for i in range(shape.n_layer)] if conv else n_kv
    header = _header(shape, shape.architecture, title, types, *layers, shape.heads, of_layers)
    if conv:
        header.add_shortconv_l_cache(conv.kernel)
    if shape.delta_net:
        _add_delta_net(header, shape.delta_net, shape.heads.dim)
    else:
        header.add_rope_dimension_count(shape.heads.dim)
    if shape.experts:
        header.add_expert_count(shape.experts.n)
        header.add_expert_used_count(shape.experts.n_used)
        header.add_expert_feed_forward_length(shape.experts.n_ff)
        if shape.experts.n_dense:
            header.add_leading_dense_block_count(shape.experts.n_dense)
        if shape.architecture == "lfm2moe":
            header.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if shape.experts.n_ff_shared:
            header.add_expert_shared_feed_forward_length(shape.experts.n_ff_shared)
    if shape.architecture == "gpt-oss":
        header.add_sliding_window(128)
        header.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        header.add_rope_scaling_factor(32.0)
        header.add_rope_scaling_orig_ctx_len(4096)
    if shape.n_further:
        header.add_nextn_predict_layers(shape.n_further)
    header.add_chat_template(_TEMPLATE)
    _add_vocabulary(header, shape)
    tensors = target_tensors(shape, types)
    return ShapeFile(f"{shape.name}-{quant.lower()}.gguf", header, tensors, shape.n_embd**-0.5)


def drafter_file(shape: PairShape) -> ShapeFile:
    """The drafter."""
    drafter = shape.drafter
    title = f"{drafter.family} drafter for {shape.name}, random weights"
    heads = drafter.heads or shape.heads
    layers = drafter.n_layer, drafter.n_ff
    header = _header(shape, "dflash", title, QUANTS["Q8_0"], *layers, heads, heads.n_kv)
    header.add_uint32("dflash.block_size", drafter.block_size)
    header.add_array("dflash.target_layers", list(shape.taps))
    if drafter.selector:
        header.add_uint32("dflash.conv_kernel_size", drafter.selector.kernel_size)
        header.add_uint32("dflash.conv_group_size", drafter.selector.group_size)
        header.add_uint32("dflash.selector_rank", drafter.selector.rank)
        header.add_uint32("dflash.selector_top_k", drafter.selector.top_k)
    header.add_mask_token_id(shape.n_vocab - 1)
    _add_vocabulary(header, shape)
    name = f"{shape.name}-{drafter.family}-q8_0.gguf"
    return ShapeFile(name, header, drafter_tensors(shape), shape.n_embd**-0.5)


def _header(
    shape: PairShape,
    architecture: str,
    title: str,
    quant: Quant,
    n_layer: int,
    n_ff: int,
    heads: Heads,
    n_head_kv: int | list[int],
) -> GGUFWriter:
    """The keys that both files have. `n_head_kv`: of all layers, or of each."""
    header = GGUFWriter(None, architecture)
    header.add_type(gguf.GGUFType.MODEL)
    header.add_name(title)
    header.add_file_type(quant.file_type)
    header.add_quantization_version(gguf.GGML_QUANT_VERSION)
    header.add_block_count(n_layer)
    header.add_context_length(shape.context_length)
    header.add_embedding_length(shape.n_embd)
    header.add_feed_forward_length(n_ff)
    header.add_head_count(heads.n)
    header.add_head_count_kv(n_head_kv)
    header.add_key_length(heads.dim)
    header.add_value_length(heads.dim)
    header.add_layer_norm_rms_eps(shape.rms_eps)
    header.add_rope_freq_base(shape.rope_base)
    return header


def _add_delta_net(header: GGUFWriter, net: DeltaNet, head_dim: int) -> None:
    """The keys of its layers, and of the positions of the attention between them."""
    header.add_full_attention_interval(net.interval)
    header.add_ssm_conv_kernel(net.kernel)
    header.add_ssm_state_size(net.head_dim)
    header.add_ssm_inner_size(net.n_values)
    header.add_ssm_time_step_rank(net.n_value_heads)
    header.add_ssm_group_count(net.n_key_heads)
    n_rotated = min(64, head_dim // 4)
    third = n_rotated // 6
    header.add_rope_dimension_count(n_rotated)
    if header.arch == "qwen3next":
        return
    # Of text all three parts turn by the same position.
    header.add_rope_dimension_sections([n_rotated // 2 - 2 * third, third, third, 0])


def _add_vocabulary(header: GGUFWriter, shape: PairShape) -> None:
    (tokens, merges), n = _vocabulary(shape.n_vocab), shape.n_vocab
    n_special = len(SPECIAL_TOKENS)
    header.add_tokenizer_model("gpt2")
    header.add_tokenizer_pre(shape.pre_tokenizer)
    header.add_token_list(tokens)
    header.add_token_types([TokenType.NORMAL] * (n - n_special) + [TokenType.CONTROL] * n_special)
    header.add_token_merges(merges)
    header.add_bos_token_id(n - 4)
    header.add_eos_token_id(n - 2)
    header.add_pad_token_id(n - 4)
    header.add_add_bos_token(False)


_WORDS = Path(__file__).parents[2] / "tests" / "tiny_coder" / "tiny-coder-q8_0.gguf"


@cache
def _vocabulary(n_vocab: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE that can tokenize any text: 256 bytes, the pieces of
    words of tiny-coder (its first merge alone, where there is no room), then words that no
    text has, up to the size of the real vocabulary. The last four are special."""
    letters = bytes_to_unicode()
    tokens = [letters[byte] for byte in range(256)]
    n_words = n_vocab - len(tokens) - len(SPECIAL_TOKENS)
    if n_words < 1:
        raise InputError(f"a vocabulary of {n_vocab}; expected at least {n_vocab - n_words + 1}")
    merges = GgufFile.open(_WORDS).metadata["tokenizer.ggml.merges"]
    merges = merges if len(merges) <= n_words else merges[:1]
    tokens += [merge.replace(" ", "") for merge in merges]
    words = [f"[{i:x}]" for i in range(n_words - len(merges))]
    return [*tokens, *words, *SPECIAL_TOKENS], merges
