"""GGUF files with random weights: qwen3 targets and dflash drafters of any shape, for tests.

The weights are scaled so that activations stay O(1), attention is selective and the drafts differ
from position to position: an error anywhere in a graph then shows in its output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from gguf_files import ARRAY, BOOL, INT32, STRING, UINT32, Value, keys_of
from random_model import LOGIT_STD, RandomModel

EOS, MASK = "<|endoftext|>", "<|mask|>"


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
    model = RandomModel("qwen3", quant, seed)
    shape_keys(model, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, context_length)
    model.key("rope.freq_base", 1e6)
    _vocabulary(model, n_vocab)
    model.matrix("token_embd.weight", n_vocab, n_embd, gain=LOGIT_STD)
    if not tied:
        model.matrix("output.weight", n_vocab, n_embd, gain=LOGIT_STD)
    model.norm("output_norm.weight", n_embd)
    for layer in range(n_layer):
        add_layer(model, layer, n_embd, n_head, n_head_kv, head_dim, n_ff)
    return model.write(path)


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
    target = keys_of(target_path)
    n_embd = target[f"{target['general.architecture'][0]}.embedding_length"][0]
    n_vocab = len(target["tokenizer.ggml.tokens"][0])
    model = RandomModel("dflash", quant, seed, mixed or {})
    shape_keys(model, n_layer, n_embd, n_head, n_head_kv, head_dim, n_ff, context_length)
    model.key("block_size", block_size)
    model.key("target_layers", list(target_layers))
    if sliding_window:
        model.key("attention.sliding_window", sliding_window)
        model.key("attention.sliding_window_pattern", list(pattern or [True] * n_layer))
    if rope_dimensions is not None:
        model.key("rope.dimension_count", rope_dimensions)
    for key, value in ({"rope.freq_base": 1e6} | dict(extra or {})).items():
        model.key(key, value)
    model.keys["tokenizer.ggml.mask_token_id"] = (n_vocab - 1, UINT32, None)
    model.keys |= {name: v for name, v in target.items() if name.startswith("tokenizer.")}

    model.matrix("fc.weight", n_embd, n_embd * len(target_layers))
    model.norm("enc.output_norm.weight", n_embd)
    model.norm("output_norm.weight", n_embd)
    if own_embeddings:
        model.matrix("token_embd.weight", n_vocab, n_embd, gain=LOGIT_STD)
    n_rows = reduced_vocabulary or n_vocab
    if own_head or reduced_vocabulary:
        model.matrix("output.weight", n_rows, n_embd, gain=LOGIT_STD)
    if reduced_vocabulary:
        known = np.sort(np.argsort(model.uniform("d2t", n_vocab))[:n_rows])
        model.tensors["d2t"] = known.astype(np.int64), gguf.GGMLQuantizationType.I64
    if markov:
        _markov(model, markov, n_embd, n_vocab, n_rows)
    if selector:
        _selector(model, selector, n_embd, n_vocab, n_layer)
    if rope_factors:
        factors = model.uniform("rope_freqs.weight", head_dim // 2)
        model.plain("rope_freqs.weight", 1 + 3 * factors)
    for layer in range(n_layer):
        add_layer(model, layer, n_embd, n_head, n_head_kv, head_dim, n_ff, shared_kv)
        block = f"blk.{layer}."
        widths = {"q": n_head, "k": n_head_kv, "v": n_head_kv}
        for part in (b.removeprefix(f"{layer}.") for b in biases):
            if not part[0].isdigit():  # as large as what it is added to
                name = f"{block}attn_{part}.bias"
                n = widths[part] * head_dim if part in widths else n_embd
                model.plain(name, model.normal(name, n))
        if post_norms:
            model.norm(block + "post_attention_norm.weight", n_embd)
            model.norm(block + "post_ffw_norm.weight", n_embd)
        if layer_scale:
            _scale(model, block + "layer_output_scale.weight")
        if sinks:
            name = block + "attn_sinks.weight"
            model.plain(name, 4 * model.uniform(name, n_head))
    if scales:
        products = ("fc", "output", "markov_w2", "attn_q", "attn_k", "attn_v", "attn_output")
        products += ("ffn_gate", "ffn_up", "ffn_down")
        for name in [n.removesuffix("weight") for n in model.tensors if n.endswith(".weight")]:
            if name.rstrip(".").rpartition(".")[2] in products:
                _scale(model, name + "scale")
    return model.write(path)


def shape_keys(
    model: RandomModel,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_ff: int,
    context_length: int,
) -> None:
    model.numbers(
        block_count=n_layer,
        context_length=context_length,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head_dim,
        attention__value_length=head_dim,
        attention__layer_norm_rms_epsilon=1e-6,
    )


def add_layer(
    model: RandomModel,
    layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_ff: int,
    shared_kv: bool = False,
) -> None:
    block = f"blk.{layer}."
    model.norm(block + "attn_norm.weight", n_embd)
    model.matrix(block + "attn_q.weight", n_head * head_dim, n_embd)
    model.matrix(block + "attn_k.weight", n_head_kv * head_dim, n_embd)
    if not shared_kv:
        model.matrix(block + "attn_v.weight", n_head_kv * head_dim, n_embd)
    model.matrix(block + "attn_output.weight", n_embd, n_head * head_dim, gain=2)
    # Scores of standard deviation mean^2: selective, yet no row takes all the weight.
    model.norm(block + "attn_q_norm.weight", head_dim, mean=1.4)
    model.norm(block + "attn_k_norm.weight", head_dim, mean=1.4)
    model.norm(block + "ffn_norm.weight", n_embd)
    model.matrix(block + "ffn_gate.weight", n_ff, n_embd, gain=2)
    model.matrix(block + "ffn_up.weight", n_ff, n_embd)
    model.matrix(block + "ffn_down.weight", n_embd, n_ff)


def _scale(model: RandomModel, name: str) -> None:
    model.plain(name, 0.5 + model.uniform(name, 1))


def _markov(model: RandomModel, markov: Markov, n_embd: int, n_vocab: int, n_rows: int) -> None:
    if markov.sample_from_anchor is not None:
        model.key("sample_from_anchor", markov.sample_from_anchor)
    model.matrix("markov_w1.weight", n_vocab, markov.rank, gain=2)
    model.matrix("markov_w2.weight", n_rows, markov.rank, gain=2)
    if markov.confidence:
        model.matrix("conf_proj.weight", 1, n_embd + markov.rank)
        model.plain("conf_proj.bias", model.uniform("conf_proj.bias", 1))


def _selector(
    model: RandomModel, selector: Selector, n_embd: int, n_vocab: int, n_layer: int
) -> None:
    model.key("selector_rank", selector.rank)
    model.key("selector_top_k", selector.top_k)
    model.key("conv_kernel_size", selector.kernel_size)
    model.key("conv_group_size", selector.group_size)
    # Scores of steps then vary about as much as the logits of the best candidates.
    for name in ("predecessor", "successor"):
        model.matrix(f"selector_{name}.weight", n_vocab, selector.rank, gain=2)
    model.matrix("selector_hidden.weight", selector.rank, n_embd)
    n_kernels = 2 * selector.kernel_size * (n_embd // selector.group_size)
    for layer in range(n_layer):
        for part in ("attn", "ffn"):
            name = f"blk.{layer}.{part}_conv_"
            base = model.uniform(name + "base", 2, selector.kernel_size, n_embd) - 0.5
            base[:, 0] += 1  # a row is mostly itself
            model.plain(name + "base", base)
            model.matrix(name + "proj.weight", n_kernels, n_embd, gain=0.3)


def _vocabulary(model: RandomModel, n_vocab: int) -> None:
    """A byte-level BPE: 256 bytes, one merge, then unused tokens up to end of text and mask."""
    tokens = [*_byte_characters(), "\u0120\u0120"]
    n_unused = n_vocab - len(tokens) - 2
    if n_unused < 0:
        raise ValueError(f"n_vocab is {n_vocab}, the least is {n_vocab - n_unused}")
    kinds = [int(gguf.TokenType.NORMAL)] * len(tokens) + [int(gguf.TokenType.UNUSED)] * n_unused
    kinds += [int(gguf.TokenType.CONTROL)] * 2
    tokens += [*(f"[unused{i}]" for i in range(n_unused)), EOS, MASK]
    of_tokenizer: dict[str, Value] = {
        "model": ("gpt2", STRING, None),
        "pre": ("qwen2", STRING, None),
        "tokens": (tokens, ARRAY, STRING),
        "token_type": (kinds, ARRAY, INT32),
        "merges": (["\u0120 \u0120"], ARRAY, STRING),
        "eos_token_id": (n_vocab - 2, UINT32, None),
        "add_bos_token": (False, BOOL, None),
    }
    model.keys |= {f"tokenizer.ggml.{name}": value for name, value in of_tokenizer.items()}


def _byte_characters() -> list[str]:
    """The printable character of each byte in a byte-level BPE (GPT-2's table), by byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept}
    table |= {byte: chr(256 + index) for index, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]
