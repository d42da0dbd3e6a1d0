"""The drafter that a `config.json` describes: its family, and the layout of its fields and tensors.

A drafter of a known layout is added by a line in `_ARCHITECTURES`. A layout with other names is a
`Layout`; what its layers compute beside that is in `drafter_config` (keys) and `tensors.names`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from dflash_local.errors import FileError
from dflash_local.gguf.drafter_spec import Family

from .fields import Fields, shown


@dataclass(frozen=True)
class Layout:
    """The form in which a maker publishes drafters. The defaults are z-lab's."""

    layer_fields: str = ""
    """The object in config.json that has the fields of the layers; empty: they are at the top."""
    n_head_kv: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    gemma4: bool = False
    """The layers are Gemma 4's. Other layouts have Qwen3's."""
    types_set_window: bool = False
    """`layer_types` give layers a window without `use_sliding_window`."""
    follows_mrope: bool = True
    """For a target with M-RoPE, it rotates by the temporal position."""
    reduces_vocabulary: bool = True
    """Its output head may know fewer tokens than the target."""
    fc: str = "fc.weight"
    fc_norm: str = "hidden_norm.weight"
    target_copies: tuple[str, ...] = ()
    """Tensors that are the target's, kept for training."""


Z_LAB = Layout()
SPECULATORS = Layout(
    layer_fields="transformer_layer_config",
    target_copies=("verifier_lm_head.weight", "verifier_norm.weight"),
)
MUSE_GLIMMER = Layout(
    types_set_window=True,
    follows_mrope=False,
    reduces_vocabulary=False,
    fc="encoder.fc.weight",
    fc_norm="encoder.output_norm_enc.weight",
)
GEMMA4 = Layout(
    layer_fields="text_config",
    n_head_kv="num_global_key_value_heads",
    head_dim="global_head_dim",
    gemma4=True,
    reduces_vocabulary=False,
)

# The names of llama.cpp's converter, and those under which the same models were published.
_ARCHITECTURES: dict[str, tuple[Family, Layout]] = {
    "DFlashDraftModel": ("dflash", Z_LAB),
    "DFlash2DraftModel": ("dflash2", Z_LAB),
    "MuseGlimmerAssistantModel": ("dflash", MUSE_GLIMMER),
    "Qwen3DSparkModel": ("dspark", Z_LAB),
    "DSparkDraftModel": ("dspark", Z_LAB),
    "DSparkSpeculator": ("dspark", Z_LAB),
    "DFlashSpeculator": ("dflash", Z_LAB),
    "DFlash2Speculator": ("dflash2", Z_LAB),
    "Lfm2DSparkDraftModel": ("dspark", Z_LAB),
    "LingDSparkModel": ("dspark", Z_LAB),
    "Gemma4DSparkModel": ("dspark", GEMMA4),
}
# What `speculators` calls its drafters, and the architecture of each.
_SPECULATORS = {
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2Speculator",
    "dspark": "DSparkSpeculator",
}

_ACCEPTED = (
    "a DFlash, DFlash 2 or DSpark drafter on Qwen3-type layers, the architectures "
    + ", ".join(sorted(_ARCHITECTURES))
)

_DEEPSEEK4 = (
    "a DSpark drafter of DeepSeek-V4 stages (hyper-connections, mixture of experts) inside its "
    "target's checkpoint; llama.cpp's convert_hf_to_gguf.py --dspark converts it"
)

# Any other value changes what a layer computes, in a way that llama.cpp's graph of these drafters
# does not know.
_SWITCHES = (
    "mlp_bias", "use_bias", "qkv_bias", "attention_output_gate", "attn_output_gate", "gating",
    "fc_norm", "norm_before_fc", "shift_label",
)  # fmt: skip
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size",
    "enable_moe_block",
)  # fmt: skip
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES, (False,)),
    **dict.fromkeys((*_EXPERTS, "q_lora_rank", "kv_lora_rank", "attn_logit_softcapping"), (0,)),
    "projector_type": ("dflash", "dflash2"),
    "aux_hidden_state_scales": (),
    "quantization_config": (),
}
_EXPECTED = {
    "quantization_config": "no quantised weights: give the drafter in BF16, F16 or F32",
    **dict.fromkeys(_EXPERTS, "none: layers with a mixture of experts are not known"),
}


@dataclass(frozen=True)
class ConfigFields:
    family: Family
    layout: Layout
    architecture: str
    top: Fields
    """The fields of config.json and those of the layers, wherever the layout has them."""
    nested: Fields
    """Those of `dflash_config`, if there is one."""


def identify(raw: object) -> ConfigFields:
    """The drafter that `raw`, a parsed config.json, describes.

    Raises FileError for anything else: the message says what it is, or names the field.
    """
    if not isinstance(raw, Mapping):
        raise FileError(f"config.json holds {shown(raw)}, expected a JSON object")
    fields = Fields(raw)
    architectures = fields.strings("architectures") or []
    speculators = fields.string("speculators_model_type")
    if speculators is not None and speculators not in _SPECULATORS:
        raise FileError(
            f"config.json: speculators_model_type is {speculators!r}: another kind of drafter; "
            f"expected {_ACCEPTED}"
        )
    architecture = architectures[0] if architectures else _SPECULATORS.get(speculators or "", "")
    if architecture not in _ARCHITECTURES:
        _refuse_architecture(architecture, fields)
    family, layout = _ARCHITECTURES[architecture]
    if speculators is not None and family != speculators:
        fields.refuse("speculators_model_type", f"nothing beside the architecture {architecture}")
    may_nest = layout == Z_LAB and (family == "dspark" or speculators is not None)
    if may_nest and fields.object(SPECULATORS.layer_fields):
        layout = SPECULATORS
    if layout.layer_fields and (layers := fields.object(layout.layer_fields)):
        fields = Fields({**raw, **layers.values})
    nested = fields.object("dflash_config") or Fields({}, "dflash_config.")
    config = ConfigFields(family, layout, architecture, fields, nested)
    _check_without_effect(config)
    return config


def _refuse_architecture(architecture: str, fields: Fields) -> NoReturn:
    if architecture == "DeepseekV4DSparkModel" or fields.raw("dspark_block_size") is not None:
        what = f"architectures is {architecture!r}: {_DEEPSEEK4}"
    elif architecture:
        lower = architecture.lower()
        if any(word in lower for word in ("dflash", "dspark", "eagle", "speculator", "medusa")):
            what = f"architectures is {architecture!r}: a drafter of another kind"
        else:
            what = f"architectures is {architecture!r}: a {architecture} model, no drafter"
    elif model_type := fields.string("model_type"):
        what = f"a {model_type!r} model without architectures, no drafter"
    else:
        what = "neither architectures nor model_type is given: no model's config"
    raise FileError(f"config.json: {what}; expected {_ACCEPTED}")


def _check_without_effect(config: ConfigFields) -> None:
    for fields in (config.top, config.nested):
        for name, known in _WITHOUT_EFFECT.items():
            value = fields.raw(name)
            # in Python, 0 == False
            if value is None or any(value == item for item in known):
                continue
            expected = f"{known[0]!r} or none" if known else "none"
            fields.refuse(name, _EXPECTED.get(name, expected))
