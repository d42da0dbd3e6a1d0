"""A drafter's `config.json` as the keys of its GGUF file.

The keys are those that llama.cpp's converter writes for the same config and target (its
`conversion/qwen.py`, `gemma.py`, `muse_glimmer.py`), except where a comment says why not.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_local.gguf.drafter_keys import MAX_LAYERS, spec_from_keys
from dflash_local.gguf.drafter_spec import DrafterSpec, Family

from ..key import Key, Value, header
from .attention import read_causal, read_heads, read_windows
from .families import SPECULATORS, Z_LAB, ConfigFields, Layout, identify
from .fields import Fields, refuse, stating
from .rope import Rope, read_gemma4_rope, read_rope
from .target_link import (
    TargetFacts,
    check_hidden_size,
    read_mask_token,
    read_taps,
    read_vocabulary,
)

ARCHITECTURE = "dflash"
_BLOCK = 16  # of a config that states none, as in llama.cpp
_MAX_BLOCK = 1 << 15
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
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
    family: Family  # by its architecture; `spec` has that of the GGUF file
    layout: Layout
    architecture: str  # the name in config.json
    keys: tuple[Key, ...]
    spec: DrafterSpec
    """The configuration that `keys` describe. The rank of a Markov head is 0 if only its tensors
    tell it."""
    rope: Rope
    own_embeddings: bool  # token embeddings in the checkpoint are the drafter's own
    trained_embeddings: bool | None
    tied_embeddings: bool
    states_sinks: bool | None  # attention_sink_bias
    states_confidence: bool | None  # enable_confidence_head

    @property
    def reduces_vocabulary(self) -> bool:
        """True if the output head knows fewer tokens than the target."""
        return self.spec.n_vocab_draft < self.spec.n_vocab

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about the GGUF file, in lines."""
        notes = []
        if self.spec.attention_bias:
            notes.append(
                "its attention has biases: dflash-local drafts with the file, stock llama.cpp does "
                "not load it"
            )
        if self.spec.family != self.family and self.spec.sample_from_anchor:
            notes.append(
                "it drafts at the anchor, too, without a Markov head: dflash-local does so, stock "
                "llama.cpp takes its drafts one position late"
            )
        return tuple(notes)

    def keys_for(self, tensor_names: Collection[str]) -> tuple[Key, ...]:
        """`keys`, and the one that depends on which GGUF tensors there are."""
        if self.spec.family != "dspark":
            return self.keys
        has_head = "conf_proj.weight" in tensor_names
        return (*self.keys, Key.of(f"{ARCHITECTURE}.has_confidence_head", has_head))


def read_config(raw: object, *, target: TargetFacts) -> DraftConfig:
    """The drafter that `raw`, a parsed config.json, describes.

    Raises FileError for the config of something else, and says what it is; or names the field that
    is missing, wrong, or of a kind that llama.cpp's drafters do not know.
    """
    config = identify(raw)
    config.nested.only(_NESTED, "dflash_config")
    top, gemma4 = config.top, config.layout.gemma4
    if gemma4:
        _check_gemma4(top)
    n_embd = top.need_integer("hidden_size")
    n_layer = top.need_integer("num_hidden_layers", 1, MAX_LAYERS)
    values: dict[str, Value | None] = {  # None: left out
        "block_count": n_layer,
        "context_length": top.need_integer("max_position_embeddings"),
        "embedding_length": n_embd,
        "feed_forward_length": top.need_integer("intermediate_size"),
    }
    head_dim, heads = read_heads(config, n_embd)
    window, windowed = read_windows(config, n_layer)
    rope = _rope(config, head_dim, window, target)
    check_hidden_size(config, target, n_embd)
    n_vocab, n_vocab_draft = read_vocabulary(config, target)
    layers, mask_token_id = read_taps(config, target), read_mask_token(config)
    rank, from_anchor = _read_markov(config)
    block_size = stating("block_size", config.nested, top).integer("block_size", 2, _MAX_BLOCK)
    values |= {
        **heads,
        "attention.sliding_window": window or None,
        "attention.sliding_window_pattern": windowed if window else None,
        "attention.causal": read_causal(config, windowed),
        **_rope_values(rope, gemma4),
        "attention.layer_norm_rms_epsilon": _norm_epsilon(top),
        "block_size": block_size or _BLOCK,
        **_selector_keys(config),
        **_scales(config, target, n_embd),
        "hidden_activation": _activation(config),
        "target_layers": layers,
        "sample_from_anchor": from_anchor,
    }
    keys = tuple(
        Key.of(f"{ARCHITECTURE}.{name}", value)
        for name, value in values.items()
        if value is not None
    )
    # A DSpark checkpoint without a Markov head, as DeepSeek's DFlash drafters are, is plain DFlash
    # that may also draft at the anchor.
    family: Family = "dflash" if rank == 0 else config.family
    mask = Key.of("tokenizer.ggml.mask_token_id", mask_token_id)
    spec = spec_from_keys(header(Path("config.json"), (*keys, mask)), family, n_vocab)
    return DraftConfig(
        family=config.family,
        layout=config.layout,
        architecture=config.architecture,
        keys=keys,
        spec=replace(
            spec,
            n_vocab_draft=n_vocab_draft,
            markov_rank=rank or 0,
            values_from_keys=gemma4,
            attention_bias=top.boolean("attention_bias") is True,
        ),
        rope=rope,
        own_embeddings=top.boolean("has_embed_tokens") is not False,
        trained_embeddings=top.boolean("train_embed_tokens"),
        tied_embeddings=top.boolean("tie_word_embeddings") is True,
        states_sinks=_either_boolean(config, "attention_sink_bias"),
        states_confidence=_either_boolean(config, "enable_confidence_head"),
    )


def _check_gemma4(top: Fields) -> None:
    if top.boolean("attention_k_eq_v") is not True:
        top.refuse("attention_k_eq_v", "true: no other Gemma 4 drafter is known")
    if top.number("final_logit_softcapping", positive=False):
        top.refuse("final_logit_softcapping", "none for a Gemma 4 drafter")


def _rope(config: ConfigFields, head_dim: int, window: int, target: TargetFacts) -> Rope:
    if config.layout.gemma4:
        return read_gemma4_rope(config.top, head_dim)
    return read_rope(
        config.top,
        head_dim,
        sliding=window > 0,
        mrope_target=config.layout.follows_mrope and target.uses_mrope,
    )


def _rope_values(rope: Rope, gemma4: bool) -> dict[str, Value | None]:
    scaled, yarn = rope.type in ("linear", "yarn"), rope.type == "yarn"
    # proportional RoPE rotates all dimensions, by factors
    n_rot = rope.head_dim if gemma4 else rope.n_rot
    return {
        "rope.scaling.type": rope.type if scaled else None,
        "rope.scaling.factor": rope.factor if scaled else None,
        "rope.scaling.original_context_length": rope.original_context if yarn else None,
        **{f"rope.scaling.{name}": value for name, value in rope.stated.items()},
        # llama.cpp ignores the amplitude that its own converter writes, but reads this key
        "rope.scaling.attn_factor": rope.amplitude(),
        "rope.freq_base": rope.theta,
        "rope.dimension_count": n_rot if gemma4 or rope.partial else None,
        "rope.dimension_sections": rope.sections or None,
    }


def _norm_epsilon(top: Fields) -> float:
    eps = top.number("rms_norm_eps")
    if eps is None:
        top.missing("rms_norm_eps", "a number above 0")
    return eps


def _scales(config: ConfigFields, target: TargetFacts, n_embd: int) -> dict[str, float | None]:
    softcap = _either_number(config, "final_logit_softcapping", positive=False)
    scale = _either_number(config, "input_embedding_scale")
    if config.layout.gemma4:
        scale = n_embd**0.5
    elif scale is None and config.layout == Z_LAB and config.family != "dspark":
        # Not in llama.cpp's converter. These drafters were trained on what the target's embedding
        # module gives: Gemma's scales its rows, and the tensor in the target's GGUF is not scaled.
        scale = n_embd**0.5 if target.architecture.startswith("gemma") else None
    return {
        "attention.value_scale": config.nested.number("attention_value_scale"),
        "logit_scale": _either_number(config, "output_multiplier"),
        "final_logit_softcapping": softcap if softcap is not None and softcap > 0 else None,
        "attention.scale": 1.0 if config.layout.gemma4 else None,
        "embedding_scale": scale,
    }


def _activation(config: ConfigFields) -> str | None:
    if config.layout.gemma4:
        value = config.top.string("hidden_activation") or "gelu_pytorch_tanh"
        if value != "gelu_pytorch_tanh":
            config.top.refuse("hidden_activation", "'gelu_pytorch_tanh' for a Gemma 4 drafter")
    else:
        name = "hidden_activation" if config.top.raw("hidden_act") is None else "hidden_act"
        value = config.top.string(name) or "silu"
        if value not in _ACTIVATIONS:
            config.top.refuse(name, " or ".join(map(repr, _ACTIVATIONS)))
    return None if value == "silu" else value


def _selector_keys(config: ConfigFields) -> dict[str, int]:
    """The keys of DFlash 2's convolutions and path selector; none for other families.

    Raises FileError naming the field.
    """
    fields = config.top if config.layout == SPECULATORS else config.nested
    if config.family != "dflash2":
        for name in _SELECTOR:
            if fields.raw(name) is not None:
                fields.refuse(name, f"none for the architecture {config.architecture}")
        return {}
    return {name: fields.need_integer(name) for name in _SELECTOR}


def _read_markov(config: ConfigFields) -> tuple[int | None, bool | None]:
    """The rank of DSpark's Markov head (None: as its tensors have it; 0: there is no head), and
    whether the row of the anchor drafts a token, too. Both are None for other families.

    Raises FileError naming the field.
    """
    top, nested = config.top, config.nested
    rank = stating("markov_rank", nested, top).integer("markov_rank", 0)
    rank = top.integer("dspark_markov_rank", 0) if rank is None else rank
    stated = stating("sample_from_anchor", top, nested).boolean("sample_from_anchor")
    if config.family != "dspark":
        if rank:
            refuse("markov_rank", rank, f"none for the architecture {config.architecture}")
        if stated:
            refuse("sample_from_anchor", stated, "false or none for a DFlash drafter")
        return None, None
    owner = stating("markov_head_type", nested, top)
    if owner.string("markov_head_type") not in (None, "vanilla"):
        owner.refuse("markov_head_type", "'vanilla'")
    bonus = top.boolean("dspark_bonus_anchor")
    if stated is None and bonus is not None:
        stated = not bonus
    if stated is None:
        counts_inputs = top.raw("aux_hidden_state_layer_ids") is not None
        stated = not counts_inputs and config.layout != SPECULATORS
    return rank, stated


def _either_number(config: ConfigFields, name: str, *, positive: bool = True) -> float | None:
    return stating(name, config.nested, config.top).number(name, positive=positive)


def _either_boolean(config: ConfigFields, name: str) -> bool | None:
    return stating(name, config.top, config.nested).boolean(name)
