"""The names and shapes of a drafter's tensors, in the checkpoint and in GGUF."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import FileError
from dflash_local.gguf.drafter_tensors import BIASED, D2T, expected_shapes, ids_faults

from ..config.drafter_config import DraftConfig
from ..files.checkpoint import TensorEntry
from .plan import TensorPlan

_LISTED = 8  # names that a message repeats
_SINKS = ("attention_sink_bias", "sinks", "learnable_sink_param")
_SCALAR = "layer_output_scale.weight"
# in the GGUF file and in the checkpoint
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class _Expected:
    """A tensor that the checkpoint should have."""

    name: str  # in the GGUF file
    sources: tuple[str, ...]  # its possible names in the checkpoint, without "model."
    permute_heads: int = 0
    optional: bool = False


def plan_tensors(config: DraftConfig, tensors: Mapping[str, TensorEntry]) -> list[TensorPlan]:
    """The tensors of the GGUF file, in the order in which they are written.

    Raises FileError, with the names, for tensors that are missing or unknown, or whose shape is not
    that of the config.
    """
    found = _by_plain_name(tensors)
    skipped = left_out(config, tensors)
    shapes = _shapes(config, found)
    factors = config.rope.frequency_factors()
    plans, missing = [], []
    if factors:
        plans.append(TensorPlan("rope_freqs.weight", "", (len(factors),), values=factors))
    used: set[str] = set()
    for expected in _expected(config):
        names = [source for source in expected.sources if source in found]
        if not names:
            if not expected.optional:
                missing.append(expected.sources[0])
            continue
        entry = found[names[0]]
        used.add(entry.name)
        if entry.name in skipped:
            continue
        shape = shapes[expected.name]
        _check_shape(entry, expected.name, shape)
        plans.append(TensorPlan(expected.name, entry.name, shape, expected.permute_heads))
    _check_names(config, missing, [name for name in tensors if name not in used | skipped.keys()])
    return plans


def left_out(config: DraftConfig, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """The tensors of the checkpoint that the GGUF file does not hold, and why, in words."""
    found = _by_plain_name(tensors)
    reasons: dict[str, str] = {}
    if config.family == "dspark" or config.reduces_vocabulary:
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
    for fault in ids_faults(ids, n_vocab):
        raise FileError(fault)
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
    if config.reduces_vocabulary:
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


def _shapes(config: DraftConfig, found: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in the GGUF file, in ggml's order."""
    spec = config.spec
    if spec.family == "dspark" and not spec.markov_rank:
        table = found.get("markov_head.markov_w1.weight")
        rank = table.shape[1] if table is not None and len(table.shape) == 2 else 1
        spec = replace(spec, markov_rank=rank)
    required, optional = expected_shapes(spec)
    return required | optional | {D2T: (spec.n_vocab_draft,)}


def _expected(config: DraftConfig) -> Iterator[_Expected]:
    layout, reduced = config.layout, config.reduces_vocabulary
    yield _Expected("enc.output_norm.weight", (layout.fc_norm,))
    yield _Expected("fc.weight", (layout.fc,))
    yield _Expected("output_norm.weight", ("norm.weight",))
    yield _Expected("token_embd.weight", ("embed_tokens.weight",), optional=True)
    # a Gemma 4 drafter has its own head, or its embeddings are the head
    needed = reduced or (layout.gemma4 and not config.tied_embeddings)
    yield _Expected("output.weight", ("lm_head.weight",), optional=not needed)
    yield _Expected(D2T, ("d2t",), optional=not reduced)
    if config.spec.family == "dflash2":
        for part in ("predecessor", "successor"):
            codebook = f"candidate_selector.{part}_codebook"
            yield _Expected(f"selector_{part}.weight", (codebook, f"{codebook}.weight"))
        yield _Expected("selector_hidden.weight", ("candidate_selector.hidden_projection.weight",))
    if config.spec.family == "dspark":
        for table in ("markov_w1.weight", "markov_w2.weight"):
            yield _Expected(table, (f"markov_head.{table}",))
        heads = ["confidence_head.proj", "confidence_proj"]
        if layout.gemma4:
            heads.reverse()
        for part in ("weight", "bias"):
            optional = part == "bias" or config.states_confidence is not True
            sources = tuple(f"{head}.{part}" for head in heads)
            yield _Expected(f"conf_proj.{part}", sources, optional=optional)
    for layer in range(config.spec.n_layer):
        yield from _layer(config, layer)


def _layer(config: DraftConfig, layer: int) -> Iterator[_Expected]:
    gemma4, spec, place = config.layout.gemma4, config.spec, f"layers.{layer}."
    permuted = {}
    if config.rope.interleaved:
        permuted = {
            "attn_q": spec.n_head,
            "attn_k": spec.n_head_kv,
            "attn_q_norm": 1,
            "attn_k_norm": 1,
        }

    def copied(name: str, source: str, end: str = "weight") -> _Expected:
        source = f"{place}{source}.{end}"
        return _Expected(f"blk.{layer}.{name}.{end}", (source,), permuted.get(name, 0))

    for name, source in _ATTENTION.items():
        if name != "attn_v" or not spec.values_from_keys:
            yield copied(name, source)
    if spec.attention_bias:
        for name in BIASED:
            yield copied(name, _ATTENTION[name], "bias")
    sinks = [f"{place}self_attn.{stem}{end}" for stem in _SINKS for end in ("", ".weight")]
    optional = config.states_sinks is not True
    yield _Expected(f"blk.{layer}.attn_sinks.weight", tuple(sinks), optional=optional)
    if gemma4:
        yield copied("post_attention_norm", "post_attention_layernorm")
        yield copied("ffn_norm", "pre_feedforward_layernorm")
        yield copied("post_ffw_norm", "post_feedforward_layernorm")
        scalar = (f"{place}layer_scalar", f"{place}layer_scalar.weight")
        yield _Expected(f"blk.{layer}.{_SCALAR}", scalar)
    else:
        yield copied("ffn_norm", "post_attention_layernorm")
    for part in ("gate", "up", "down"):
        yield copied(f"ffn_{part}", f"mlp.{part}_proj")
    if spec.selector is not None:
        for name, source in (("attn_conv", "attention_conv"), ("ffn_conv", "mlp_conv")):
            base = f"{place}{source}.base_kernel"
            yield _Expected(f"blk.{layer}.{name}_base", (base,))
            yield copied(f"{name}_proj", f"{source}.kernel_projection")


def _check_shape(entry: TensorEntry, name: str, shape: tuple[int, ...]) -> None:
    is_scalar = name.endswith(_SCALAR) and entry.n_elements == 1
    if entry.shape != shape[::-1] and not is_scalar:
        raise FileError(
            f"tensor {entry.name!r} has the shape {list(entry.shape)}, expected "
            f"{list(shape[::-1])} from config.json"
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
