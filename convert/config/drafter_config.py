"""A drafter's `config.json` as the keys of its GGUF file.

The keys are those that llama.cpp's converter writes for the same config and target (its
`conversion/qwen.py`, `gemma.py`, `muse_glimmer.py`), except where a comment says why not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_local.gguf.drafter_keys import MAX_LAYERS
from dflash_local.gguf.drafter_spec import Family

from ..key import Key, KeyKind, Value
from .attention import Attention, read_attention
from .families import Z_LAB, ConfigFields, Layout, identify
from .fields import Fields
from .heads import Markov, Selector, read_markov, read_selector
from .rope import Rope, read_gemma4_rope, read_rope
from .target_link import TargetLink, read_target_link, target_fields, uses_mrope

ARCHITECTURE = "dflash"
_BLOCK = 16  # of a config that states none, as in llama.cpp
_MAX_BLOCK = 1 << 15
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")  # llama.cpp's names; its default is silu
# fields of dflash_config that are read, that do not matter, or that are only for training
_NESTED = frozenset({
    "block_size", "runtime_block_size", "mask_token", "mask_token_id", "target_layer_ids",
    "num_target_layers", "causal", "use_swa", "swa_window_size", "attention_value_scale",
    "attention_sink_bias", "output_multiplier", "final_logit_softcapping",
    "input_embedding_scale", "conv_kernel_size", "conv_group_size", "selector_rank",
    "selector_top_k", "selector_vocab_size", "sample_from_anchor", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "use_aux_hidden_state", "projector_type", "num_anchors", "loss_decay_gamma",
    "backbone_rotary_base",
})  # fmt: skip


@dataclass(frozen=True)
class DraftConfig:
    """A drafter as its config states it. Sizes are in elements."""

    family: Family  # by its architecture; see `drafts_as`
    layout: Layout
    architecture: str  # the name in config.json
    n_embd: int
    n_layer: int
    n_ff: int
    context_length: int
    block_size: int
    attention: Attention
    rope: Rope
    target: TargetLink
    selector: Selector | None  # DFlash 2
    markov: Markov | None  # DSpark
    own_embeddings: bool  # token embeddings in the checkpoint are the drafter's own
    trained_embeddings: bool | None
    tied_embeddings: bool
    states_sinks: bool | None  # attention_sink_bias
    states_confidence: bool | None  # enable_confidence_head
    keys: tuple[Key, ...]

    @property
    def n_vocab(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.target.n_vocab

    @property
    def n_vocab_draft(self) -> int | None:
        """Rows of a reduced output head, None where there is none."""
        return self.target.n_vocab_draft

    @property
    def mask_token_id(self) -> int:
        return self.target.mask_token_id

    @property
    def drafts_as(self) -> Family:
        """The family of the GGUF file. A DSpark checkpoint without a Markov head, as DeepSeek's
        DFlash drafters are, is plain DFlash that may also draft at the anchor."""
        return "dflash" if self.markov is not None and self.markov.rank == 0 else self.family

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the GGUF file, in lines."""
        notes = []
        if self.attention.bias:
            notes.append(
                "its attention has biases: dflash-local drafts with the file, stock llama.cpp does "
                "not load it"
            )
        if self.drafts_as != self.family and self.markov and self.markov.sample_from_anchor:
            notes.append(
                "it drafts at the anchor, too, without a Markov head: dflash-local does so, stock "
                "llama.cpp takes its drafts one position late"
            )
        return tuple(notes)

    @property
    def target_layers(self) -> tuple[int, ...]:
        """Tap k is the INPUT of this layer of the target."""
        return self.target.layers

    def keys_for(self, tensor_names: Collection[str]) -> tuple[Key, ...]:
        """`keys`, and the one that depends on which GGUF tensors there are."""
        if self.drafts_as != "dspark":
            return self.keys
        has_head = "conf_proj.weight" in tensor_names
        return (*self.keys, _key("has_confidence_head", has_head, "bool"))


def read_config(raw: object, *, target: Mapping[str, Any] | None) -> DraftConfig:
    """The drafter that `raw`, a parsed config.json, describes.

    `target`: the target's config.json (or `target_facts` of its GGUF file), which says whether the
    target uses M-RoPE and scaled embeddings, and how many layers it has. Raises FileError for the
    config of something else, and says what it is; or names the field that is missing, wrong, or of
    a kind that llama.cpp's drafters do not know.
    """
    config = identify(raw)
    config.nested.only(_NESTED, "dflash_config")
    told = target_fields(target)
    top, gemma4 = config.top, config.layout.gemma4
    if gemma4:
        _check_gemma4(top)
    n_embd = top.need_integer("hidden_size")
    n_layer = top.need_integer("num_hidden_layers", 1, MAX_LAYERS)
    n_ff = top.need_integer("intermediate_size")
    context_length = top.need_integer("max_position_embeddings")
    attention = read_attention(config, n_embd, n_layer)
    rope = _rope(config, attention, told)
    link = read_target_link(config, told, n_embd)
    selector, markov = read_selector(config, n_embd), read_markov(config)
    block_size = _block_size(config)
    keys = [
        _key("block_count", n_layer, "u32"),
        _key("context_length", context_length, "u32"),
        _key("embedding_length", n_embd, "u32"),
        _key("feed_forward_length", n_ff, "u32"),
        *_attention_keys(attention),
        *_rope_keys(rope, gemma4),
        *_norm_keys(top),
        _key("block_size", block_size, "u32"),
        *_selector_keys(selector),
        *_scale_keys(config, told, n_embd),
        *_activation_keys(config),
        _key("target_layers", link.layers, "arr_i32"),
    ]
    if markov is not None:
        keys.append(_key("sample_from_anchor", markov.sample_from_anchor, "bool"))
    return DraftConfig(
        family=config.family,
        layout=config.layout,
        architecture=config.architecture,
        n_embd=n_embd,
        n_layer=n_layer,
        n_ff=n_ff,
        context_length=context_length,
        block_size=block_size,
        attention=attention,
        rope=rope,
        target=link,
        selector=selector,
        markov=markov,
        own_embeddings=top.boolean("has_embed_tokens") is not False,
        trained_embeddings=top.boolean("train_embed_tokens"),
        tied_embeddings=top.boolean("tie_word_embeddings") is True,
        states_sinks=_either_boolean(config, "attention_sink_bias"),
        states_confidence=_either_boolean(config, "enable_confidence_head"),
        keys=tuple(keys),
    )


def _key(name: str, value: Value, kind: KeyKind) -> Key:
    return Key(f"{ARCHITECTURE}.{name}", value, kind)


def _check_gemma4(top: Fields) -> None:
    if top.boolean("attention_k_eq_v") is not True:
        top.refuse("attention_k_eq_v", "true: no other Gemma 4 drafter is known")
    if top.number("final_logit_softcapping", positive=False):
        top.refuse("final_logit_softcapping", "none for a Gemma 4 drafter")


def _rope(config: ConfigFields, attention: Attention, target: Fields) -> Rope:
    if config.layout.gemma4:
        return read_gemma4_rope(config.top, attention.head_dim)
    return read_rope(
        config.top,
        attention.head_dim,
        sliding=attention.window > 0,
        mrope_target=config.layout.follows_mrope and uses_mrope(target),
    )


def _block_size(config: ConfigFields) -> int:
    for fields in (config.nested, config.top):
        size = fields.integer("block_size", 2, _MAX_BLOCK)
        if size is not None:
            return size
    return _BLOCK


def _attention_keys(attention: Attention) -> Iterator[Key]:
    yield _key("attention.head_count", attention.n_head, "u32")
    if attention.states_kv:
        yield _key("attention.head_count_kv", attention.n_head_kv, "u32")
    if attention.states_dim:
        yield _key("attention.key_length", attention.head_dim, "u32")
        yield _key("attention.value_length", attention.head_dim, "u32")
    if attention.window:
        yield _key("attention.sliding_window", attention.window, "u32")
        yield _key("attention.sliding_window_pattern", attention.windowed, "arr_bool")
    if attention.causal is not None:
        yield _key("attention.causal", attention.causal, "bool")


def _rope_keys(rope: Rope, gemma4: bool) -> Iterator[Key]:
    if rope.type in ("linear", "yarn") and rope.factor is not None:
        yield _key("rope.scaling.type", rope.type, "str")
        yield _key("rope.scaling.factor", rope.factor, "f32")
    if rope.type == "yarn" and rope.original_context is not None:
        yield _key("rope.scaling.original_context_length", rope.original_context, "u32")
        for name, value in rope.stated.items():
            yield _key(f"rope.scaling.{name}", value, "f32")
        if (amplitude := rope.amplitude()) is not None:
            # llama.cpp ignores the amplitude that its own converter writes, but reads this key
            yield _key("rope.scaling.attn_factor", amplitude, "f32")
    if rope.theta is not None:
        yield _key("rope.freq_base", rope.theta, "f32")
    if gemma4 or rope.partial:
        # proportional RoPE rotates all dimensions, by factors
        n_rot = rope.head_dim if gemma4 else rope.n_rot
        yield _key("rope.dimension_count", n_rot, "u32")
    if rope.sections:
        yield _key("rope.dimension_sections", rope.sections, "arr_i32")


def _norm_keys(top: Fields) -> Iterator[Key]:
    eps = top.number("rms_norm_eps")
    if eps is None:
        top.missing("rms_norm_eps", "a number above 0")
    yield _key("attention.layer_norm_rms_epsilon", eps, "f32")


def _selector_keys(selector: Selector | None) -> Iterator[Key]:
    if selector is not None:
        yield _key("conv_kernel_size", selector.conv_kernel_size, "u32")
        yield _key("conv_group_size", selector.conv_group_size, "u32")
        yield _key("selector_rank", selector.rank, "u32")
        yield _key("selector_top_k", selector.top_k, "u32")


def _scale_keys(config: ConfigFields, target: Fields, n_embd: int) -> Iterator[Key]:
    value_scale = config.nested.number("attention_value_scale")
    if value_scale is not None:
        yield _key("attention.value_scale", value_scale, "f32")
    logit_scale = _either_number(config, "output_multiplier")
    if logit_scale is not None:
        yield _key("logit_scale", logit_scale, "f32")
    softcap = _either_number(config, "final_logit_softcapping", positive=False)
    if softcap is not None and softcap > 0:
        yield _key("final_logit_softcapping", softcap, "f32")
    scale = _either_number(config, "input_embedding_scale")
    if config.layout.gemma4:
        scale = n_embd**0.5
        yield _key("attention.scale", 1.0, "f32")
    elif scale is None and config.layout == Z_LAB and config.family != "dspark":
        # Not in llama.cpp's converter. These drafters were trained on what the target's embedding
        # module gives: Gemma's scales its rows, and the tensor in the target's GGUF is not scaled.
        model_type = target.string("model_type") or ""
        scale = n_embd**0.5 if model_type.startswith("gemma") else None
    if scale is not None:
        yield _key("embedding_scale", scale, "f32")


def _activation_keys(config: ConfigFields) -> Iterator[Key]:
    if config.layout.gemma4:
        value = config.top.string("hidden_activation") or "gelu_pytorch_tanh"
        if value != "gelu_pytorch_tanh":
            config.top.refuse("hidden_activation", "'gelu_pytorch_tanh' for a Gemma 4 drafter")
    else:
        name = "hidden_activation" if config.top.raw("hidden_act") is None else "hidden_act"
        value = config.top.string(name) or "silu"
        if value not in _ACTIVATIONS:
            config.top.refuse(name, " or ".join(map(repr, _ACTIVATIONS)))
    if value != "silu":
        yield _key("hidden_activation", value, "str")


def _either_number(config: ConfigFields, name: str, *, positive: bool = True) -> float | None:
    value = config.nested.number(name, positive=positive)
    return config.top.number(name, positive=positive) if value is None else value


def _either_boolean(config: ConfigFields, name: str) -> bool | None:
    value = config.top.boolean(name)
    return config.nested.boolean(name) if value is None else value
