"""Which drafter a `config.json` describes, and its fields in one layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from dflash_local.errors import FileError

from .fields import Fields, shown

Family = Literal["dflash", "dflash2", "dspark"]
Layout = Literal["z-lab", "speculators", "muse-glimmer", "gemma4"]

# The names of llama.cpp's converter, and those under which the same models were published.
_ARCHITECTURES: dict[str, tuple[Family, Layout]] = {
    "DFlashDraftModel": ("dflash", "z-lab"),
    "DFlash2DraftModel": ("dflash2", "z-lab"),
    "MuseGlimmerAssistantModel": ("dflash", "muse-glimmer"),
    "Qwen3DSparkModel": ("dspark", "z-lab"),
    "DSparkDraftModel": ("dspark", "z-lab"),
    "DSparkSpeculator": ("dspark", "z-lab"),
    "Lfm2DSparkDraftModel": ("dspark", "z-lab"),
    "LingDSparkModel": ("dspark", "z-lab"),
    "Gemma4DSparkModel": ("dspark", "gemma4"),
}

_ACCEPTED = (
    "a DFlash, DFlash 2 or DSpark drafter on Qwen3-type layers, the architectures "
    + ", ".join(sorted(_ARCHITECTURES))
)

_DEEPSEEK4 = (
    "a DSpark drafter of DeepSeek-V4 stages (hyper-connections, mixture of experts) inside its "
    "target's checkpoint; llama.cpp's convert_hf_to_gguf.py --dspark converts it"
)

# A value other than these changes what a layer computes, in ways that llama.cpp's graph of these
# drafters has no place for.
_INERT: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
    "use_bias": (False,),
    "qkv_bias": (False,),
    "attention_output_gate": (False,),
    "attn_output_gate": (False,),
    "gating": (False,),
    "fc_norm": (False,),
    "norm_before_fc": (False,),
    "projector_type": ("dflash", "dflash2"),
    "shift_label": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "moe_intermediate_size": (0,),
    "enable_moe_block": (False,),
    "q_lora_rank": (0,),
    "kv_lora_rank": (0,),
    "attn_logit_softcapping": (0, 0.0),
    "aux_hidden_state_scales": (),
    "quantization_config": (),
}
_WHY = {
    "quantization_config": "no quantised weights: give the drafter in BF16, F16 or F32",
}
_MOE = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "enable_moe_block",
)


@dataclass(frozen=True)
class Kind:
    """A drafter's config, told apart and brought into one layout."""

    family: Family
    layout: Layout
    architecture: str
    top: Fields  # the layers' fields, of whatever layout, at the top level
    nested: Fields  # `dflash_config`, or nothing


def tell_kind(raw: object) -> Kind:
    """The kind of drafter that the parsed config.json `raw` describes.

    Raises FileError for anything else: the message says what it is, or names the field.
    """
    if not isinstance(raw, Mapping):
        raise FileError(f"config.json holds {shown(raw)}, expected a JSON object")
    fields = Fields(raw)
    architectures = fields.strings("architectures") or []
    speculators = fields.string("speculators_model_type")
    if speculators is not None and speculators != "dspark":
        _refuse_speculators(speculators)
    architecture = architectures[0] if architectures else ""
    if not architecture and speculators == "dspark":
        architecture = "DSparkSpeculator"
    if architecture not in _ARCHITECTURES:
        _refuse_architecture(architecture, fields)
    family, layout = _ARCHITECTURES[architecture]
    if speculators is not None and family != "dspark":
        fields.refuse("speculators_model_type", f"nothing beside the architecture {architecture}")
    if family == "dspark" and layout == "z-lab" and (layers := fields.object(_LAYERS)):
        layout = "speculators"
        fields = Fields({**raw, **layers.values})
    elif layout == "gemma4" and (text := fields.object("text_config")):
        fields = Fields({**raw, **text.values})
    nested = fields.object("dflash_config") or Fields({}, "dflash_config.")
    kind = Kind(family, layout, architecture, fields, nested)
    _check_inert(kind)
    return kind


_LAYERS = "transformer_layer_config"


def _refuse_speculators(name: str) -> NoReturn:
    if name == "dflash":
        raise FileError(
            "config.json: speculators_model_type is 'dflash', expected 'dspark' or the original "
            "layout of DFlash: which layers the tap numbers of a speculators DFlash drafter mean "
            "differs between versions of speculators, and llama.cpp does not convert it either"
        )
    raise FileError(
        f"config.json: speculators_model_type is {name!r}: another kind of drafter; expected "
        + _ACCEPTED
    )


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


def _check_inert(kind: Kind) -> None:
    for fields in (kind.top, kind.nested):
        for name, inert in _INERT.items():
            value = fields.raw(name)
            # `in` alone would take 0 for False
            if value is None or any(value == item for item in inert):
                continue
            if name in _MOE:
                fields.refuse(name, "none: layers with a mixture of experts are not known")
            fields.refuse(name, _WHY.get(name, f"{inert[0]!r} or none" if inert else "none"))
