"""The names and shapes of a drafter's tensors, in the checkpoint and in GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import FileError

from ..config.drafter_config import DraftConfig
from ..files.safetensors_header import TensorEntry
from .plan import Role, TensorPlan

_LISTED = 8  # names that a message repeats
_SINKS = ("attention_sink_bias", "sinks", "learnable_sink_param")


@dataclass(frozen=True)
class _Expected:
    """A tensor that the checkpoint should have; in `shape` the axis of rows is first."""

    name: str
    sources: tuple[str, ...]  # its possible names, without "model."
    shape: tuple[int, ...]
    role: Role
    permute_heads: int = 0
    optional: bool = False


def plan_tensors(config: DraftConfig, tensors: Mapping[str, TensorEntry]) -> list[TensorPlan]:
    """The tensors of the GGUF file, in the order in which they are written.

    Raises FileError, with the names, for tensors that are missing or unknown, or whose shape is not
    that of the config.
    """
    found = _by_plain_name(tensors)
    skipped = left_out(config, tensors)
    plans, missing = _computed(config), []
    used: set[str] = set()
    for expected in _expected(config, found):
        names = [source for source in expected.sources if source in found]
        if not names:
            if not expected.optional:
                missing.append(expected.sources[0])
            continue
        entry = found[names[0]]
        used.add(entry.name)
        if entry.name in skipped:
            continue
        _check_shape(entry, expected)
        shape = tuple(reversed(expected.shape))
        plan = TensorPlan(expected.name, entry.name, shape, expected.role, expected.permute_heads)
        plans.append(plan)
    _check_names(config, missing, [name for name in tensors if name not in used | skipped.keys()])
    return plans


def left_out(config: DraftConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The tensors of the checkpoint that the GGUF file does not hold, and why, in words."""
    found = _by_plain_name(tensors)
    reasons: dict[str, str] = {}
    if config.family == "dspark" or config.n_vocab_draft is not None:
        reasons["t2d"] = "the reverse of d2t"
    reasons |= dict.fromkeys(config.layout.target_copies, "a copy of the target's, for training")
    reasons |= {
        name: "computed from the config" for name in found if name.endswith("rotary_emb.inv_freq")
    }
    reasons |= _shared_with_target(config, found)
    return {found[name].name: why for name, why in reasons.items() if name in found}


def absolute_ids(offsets: NDArray[np.int64], n_vocab: int) -> NDArray[np.int64]:
    """The target's token for each row of a reduced head, from `d2t`: [rows], int64.

    Raises FileError when one is outside the vocabulary, or occurs twice.
    """
    ids = offsets.astype(np.int64) + np.arange(offsets.size, dtype=np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if outside.size:
        row = int(outside[0])
        raise FileError(
            f"d2t: row {row} stands for token {int(ids[row])}, expected 0 to {n_vocab - 1}"
        )
    values, counts = np.unique(ids, return_counts=True)
    if ids.size != values.size:
        raise FileError(f"d2t: two rows stand for token {int(values[np.argmax(counts)])}")
    return ids


def _by_plain_name(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors by their names without `model.`, with which some checkpoints begin them."""
    found: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        plain = name.removeprefix("model.")
        if plain in found:
            raise FileError(f"tensors {found[plain].name!r} and {name!r} are the same one twice")
        found[plain] = entry
    return found


def _shared_with_target(config: DraftConfig, found: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Embeddings and output head of the checkpoint, if those of the target are used instead."""
    embeddings, head = "embed_tokens.weight", "lm_head.weight"
    why = "the target's own is used"
    if config.n_vocab_draft is not None:
        return {} if config.own_embeddings else {embeddings: why}
    shared = config.family == "dspark" and not config.layout.gemma4  # the head is the target's
    if not config.own_embeddings or (shared and config.trained_embeddings is False):
        return {embeddings: why, head: why} if shared else {embeddings: why}
    if embeddings not in found:
        return {head: why} if shared else {}
    if head in found or config.tied_embeddings:
        return {}
    # llama.cpp would use these embeddings as the output head, too
    if config.trained_embeddings:
        raise FileError(
            "tensor lm_head.weight is missing: the drafter has embeddings of its own, which "
            "llama.cpp's drafters can only have together with an output head"
        )
    return {embeddings: why}


def _computed(config: DraftConfig) -> list[TensorPlan]:
    factors = config.rope.frequency_factors()
    if not factors:
        return []
    return [TensorPlan("rope_freqs.weight", "", (len(factors),), "rope", values=factors)]


def _expected(config: DraftConfig, found: Mapping[str, TensorEntry]) -> Iterator[_Expected]:
    n, n_taps = config.n_embd, len(config.target_layers)
    yield _Expected("enc.output_norm.weight", (config.layout.fc_norm,), (n,), "norm")
    yield _Expected("fc.weight", (config.layout.fc,), (n, n_taps * n), "fc")
    yield _Expected("output_norm.weight", ("norm.weight",), (n,), "norm")
    yield from _vocabulary(config)
    if config.selector is not None:
        yield from _selector(config, config.selector.rank)
    if config.drafts_as == "dspark":
        yield from _markov(config, found)
    for layer in range(config.n_layer):
        yield from _layer(config, f"layers.{layer}.", f"blk.{layer}.")


def _vocabulary(config: DraftConfig) -> Iterator[_Expected]:
    reduced, n = config.n_vocab_draft, config.n_embd
    rows = config.n_vocab if reduced is None else reduced
    yield _Expected(
        "token_embd.weight",
        ("embed_tokens.weight",),
        (config.n_vocab, n),
        "embedding",
        optional=True,
    )
    # a Gemma 4 drafter has its own head, or its embeddings are the head
    needed = reduced is not None or (config.layout.gemma4 and not config.tied_embeddings)
    yield _Expected("output.weight", ("lm_head.weight",), (rows, n), "head", optional=not needed)
    yield _Expected("d2t", ("d2t",), (rows,), "ids", optional=reduced is None)


def _selector(config: DraftConfig, rank: int) -> Iterator[_Expected]:
    prefix, shape = "candidate_selector.", (config.n_vocab, rank)
    for name, source in (
        ("selector_predecessor.weight", "predecessor_codebook"),
        ("selector_successor.weight", "successor_codebook"),
    ):
        sources = (prefix + source, f"{prefix}{source}.weight")
        yield _Expected(name, sources, shape, "selector")
    source = f"{prefix}hidden_projection.weight"
    yield _Expected("selector_hidden.weight", (source,), (rank, config.n_embd), "selector")


def _markov(config: DraftConfig, found: Mapping[str, TensorEntry]) -> Iterator[_Expected]:
    first, second = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    rank = config.markov.rank if config.markov is not None else None
    if rank is None:
        entry = found.get(first)
        rank = entry.shape[1] if entry is not None and len(entry.shape) == 2 else 1
    reduced = config.n_vocab_draft
    rows = config.n_vocab if reduced is None else reduced
    yield _Expected("markov_w1.weight", (first,), (config.n_vocab, rank), "markov")
    yield _Expected("markov_w2.weight", (second,), (rows, rank), "markov")
    optional = config.states_confidence is not True
    heads = ["confidence_head.proj", "confidence_proj"]
    if config.layout.gemma4:
        heads.reverse()
    for part, shape in (("weight", (1, config.n_embd + rank)), ("bias", (1,))):
        sources = tuple(f"{head}.{part}" for head in heads)
        missable = optional or part == "bias"
        yield _Expected(f"conf_proj.{part}", sources, shape, "confidence", optional=missable)


def _layer(config: DraftConfig, source: str, name: str) -> Iterator[_Expected]:
    n, n_ff, attention = config.n_embd, config.n_ff, config.attention
    n_q, n_kv, head_dim = attention.n_q, attention.n_kv, attention.head_dim
    gemma4 = config.layout.gemma4
    q_heads, kv_heads, one = (
        (attention.n_head, attention.n_head_kv, 1) if config.rope.interleaved else (0, 0, 0)
    )

    def want(
        target: str, origin: str, shape: tuple[int, ...], role: Role, permute: int = 0
    ) -> _Expected:
        return _Expected(
            f"{name}{target}.weight", (f"{source}{origin}.weight",), shape, role, permute
        )

    yield want("attn_norm", "input_layernorm", (n,), "norm")
    yield want("attn_q", "self_attn.q_proj", (n_q, n), "matrix", q_heads)
    yield want("attn_k", "self_attn.k_proj", (n_kv, n), "matrix", kv_heads)
    if not gemma4:
        yield want("attn_v", "self_attn.v_proj", (n_kv, n), "matrix")
    yield want("attn_output", "self_attn.o_proj", (n, n_q), "matrix")
    yield want("attn_q_norm", "self_attn.q_norm", (head_dim,), "norm", one)
    yield want("attn_k_norm", "self_attn.k_norm", (head_dim,), "norm", one)
    if attention.bias:
        yield from _biases(config, source, name, (q_heads, kv_heads))
    yield _sinks(config, source, name)
    if gemma4:
        yield want("post_attention_norm", "post_attention_layernorm", (n,), "norm")
        yield want("ffn_norm", "pre_feedforward_layernorm", (n,), "norm")
        yield want("post_ffw_norm", "post_feedforward_layernorm", (n,), "norm")
        scalar = (f"{source}layer_scalar", f"{source}layer_scalar.weight")
        yield _Expected(f"{name}layer_output_scale.weight", scalar, (1,), "scale")
    else:
        yield want("ffn_norm", "post_attention_layernorm", (n,), "norm")
    yield want("ffn_gate", "mlp.gate_proj", (n_ff, n), "matrix")
    yield want("ffn_up", "mlp.up_proj", (n_ff, n), "matrix")
    yield want("ffn_down", "mlp.down_proj", (n, n_ff), "matrix")
    if config.selector is not None:
        yield from _convolutions(config, source, name)


def _biases(
    config: DraftConfig, source: str, name: str, heads: tuple[int, int]
) -> Iterator[_Expected]:
    """`heads`: of queries and of keys, whose rows are permuted like those of the weights."""
    n_q, n_kv = config.attention.n_q, config.attention.n_kv
    for target, origin, width, permute in (
        ("attn_q", "q_proj", n_q, heads[0]),
        ("attn_k", "k_proj", n_kv, heads[1]),
        ("attn_v", "v_proj", n_kv, 0),
        ("attn_output", "o_proj", config.n_embd, 0),
    ):
        sources = (f"{source}self_attn.{origin}.bias",)
        yield _Expected(f"{name}{target}.bias", sources, (width,), "bias", permute)


def _sinks(config: DraftConfig, source: str, name: str) -> _Expected:
    stems = [f"{source}self_attn.{stem}" for stem in _SINKS]
    return _Expected(
        f"{name}attn_sinks.weight",
        tuple(stem + end for stem in stems for end in ("", ".weight")),
        (config.attention.n_head,),
        "sinks",
        optional=config.states_sinks is not True,
    )


def _convolutions(config: DraftConfig, source: str, name: str) -> Iterator[_Expected]:
    selector = config.selector
    if selector is None:
        return
    kernel, groups = selector.conv_kernel_size, config.n_embd // selector.conv_group_size
    projected = (2 * kernel * groups, config.n_embd)
    for target, origin in (("attn_conv", "attention_conv"), ("ffn_conv", "mlp_conv")):
        base = f"{source}{origin}.base_kernel"
        shape = (2, kernel, config.n_embd)
        yield _Expected(f"{name}{target}_base", (base,), shape, "conv")
        projection = f"{source}{origin}.kernel_projection.weight"
        yield _Expected(f"{name}{target}_proj.weight", (projection,), projected, "conv")


def _check_shape(entry: TensorEntry, expected: _Expected) -> None:
    scalar = expected.role == "scale" and entry.n_elements == 1
    if entry.shape != expected.shape and not scalar:
        raise FileError(
            f"tensor {entry.name!r} has the shape {list(entry.shape)}, expected "
            f"{list(expected.shape)} from config.json"
        )


def _check_names(config: DraftConfig, missing: Sequence[str], unknown: Sequence[str]) -> None:
    if not missing and not unknown:
        return
    parts = [f"{len(missing)} missing: {_list(missing)}"] if missing else []
    parts += [f"{len(unknown)} not known: {_list(unknown)}"] if unknown else []
    raise FileError(
        f"tensors of the checkpoint do not fit a {config.architecture}: {'; '.join(parts)}"
    )


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, sorted(names)[:_LISTED]))
    return shown + (", ..." if len(names) > _LISTED else "")
