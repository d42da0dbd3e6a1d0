"""A drafter's rotary position embedding (RoPE), and how to state it for llama.cpp."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .fields import Fields, refuse, stating

RopeType = Literal["default", "linear", "yarn", "llama3", "proportional"]

_KNOWN = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
        *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "low_freq_factor"),
        *("high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "attn_factor"),
        *("extrapolation_factor", "truncate"),
        # These two have no effect, on purpose. The Kimi drafters state both as 1, but were trained
        # with the usual amplitude 1 + 0.1 ln(factor), which llama.cpp uses.
        "mscale",
        "mscale_all_dim",
        "finetuned",
    }
)
_TYPES: tuple[RopeType, ...] = ("default", "linear", "yarn", "llama3")
# llama.cpp computes with these values and does not read them from a drafter's file
_YARN_FIXED = {"beta_fast": 32.0, "beta_slow": 1.0, "extrapolation_factor": 1.0}


@dataclass(frozen=True)
class Rope:
    """RoPE of every layer of a drafter; `n_rot` of `head_dim` dimensions are rotated."""

    type: RopeType
    theta: float | None
    head_dim: int
    n_rot: int
    partial: bool  # there is a partial_rotary_factor, even if it is 1
    interleaved: bool  # pairs are (0, 1), (2, 3), ...: their rows are permuted to halves
    sections: tuple[int, ...] = ()  # M-RoPE's four numbers
    factor: float | None = None
    original_context: int | None = None
    attention_factor: float | None = None
    truncate: bool = True  # the ends of YaRN's ramp are rounded to whole dimensions
    stated: dict[str, float] = field(default_factory=dict)  # YaRN's fields in the config
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequency_factors(self) -> tuple[float, ...]:
        """Divisors of the `head_dim / 2` frequencies, for the tensor `rope_freqs`; or empty."""
        if self.type == "llama3":
            return _llama3_factors(self)
        if self.type == "yarn" and not self.truncate:
            return _untruncated_factors(self)
        if self.type == "proportional":
            rotated, half = self.n_rot // 2, self.head_dim // 2
            # so large that the angle stays 0 in the dimensions that are not rotated
            return (1.0,) * rotated + (float(np.float32(1e30)),) * (half - rotated)
        return ()

    def amplitude(self) -> float | None:
        """The scale of YaRN's cosines and sines on top of llama.cpp's own, 1 + 0.1 ln(factor)."""
        if self.type != "yarn" or self.attention_factor is None or self.factor is None:
            return None
        usual = 1.0 + 0.1 * math.log(self.factor) if self.factor > 1.0 else 1.0
        scale = self.attention_factor / usual
        return None if abs(scale - 1.0) < 1e-6 else scale


def read_rope(top: Fields, head_dim: int, *, sliding: bool, mrope_target: bool) -> Rope:
    """The RoPE that `top` (the layers' fields) states.

    `sliding`: some layers have a sliding window. `mrope_target`: the target uses M-RoPE, so the
    drafter has to rotate by the temporal position alone. Raises FileError naming the field.
    """
    name = "rope_parameters" if top.raw("rope_parameters") is not None else "rope_scaling"
    fields = top.object(name) or Fields({}, f"{name}.")
    fields = _of_all_layers(fields, top, sliding=sliding)
    fields.only(_KNOWN, "RoPE")
    type_field, rope_type = _type(fields)
    theta = stating("rope_theta", fields, top).number("rope_theta")
    n_rot, partial = _rotated(fields, top, head_dim)
    interleaved = top.boolean("rope_is_neox_style") is False
    if interleaved and n_rot != head_dim:
        top.refuse("rope_is_neox_style", "true or none where only a part of a head is rotated")
    sections = _sections(fields)
    if mrope_target:
        sections = (head_dim // 2, 0, 0, 0)
    if rope_type == "llama3" and (sections or n_rot != head_dim):
        beside = "M-RoPE" if sections else "partial_rotary_factor"
        expected = f"another type beside {beside}: llama.cpp would leave the factors out"
        fields.refuse(type_field, expected)
    factor = fields.number("factor")
    if rope_type in ("linear", "yarn", "llama3") and factor is None:
        fields.missing("factor", f"a number above 0 for the RoPE type {rope_type!r}")
    trained = "original_max_position_embeddings"
    context = stating(trained, fields, top).integer(trained)
    if rope_type in ("yarn", "llama3") and context is None:
        fields.missing(trained, f"a whole number for the RoPE type {rope_type!r}")
    truncate = rope_type != "yarn" or fields.boolean("truncate") is not False
    if not truncate and (sections or n_rot != head_dim):
        beside = "M-RoPE" if sections else "partial_rotary_factor"
        fields.refuse("truncate", f"true or none beside {beside}: llama.cpp cannot be told")
    if not truncate and theta is not None and theta <= 1.0:
        refuse("rope_theta", theta, "more than 1 where truncate is false")
    stated = _yarn_fields(fields) if rope_type == "yarn" else {}
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    low, high = 1.0 if low is None else low, 4.0 if high is None else high
    if rope_type == "llama3" and not low < high:
        fields.refuse("high_freq_factor", f"more than low_freq_factor, {low:g}")
    return Rope(
        type=rope_type,
        theta=theta,
        head_dim=head_dim,
        n_rot=n_rot,
        partial=partial,
        interleaved=interleaved,
        sections=sections,
        factor=factor,
        original_context=context,
        attention_factor=stated.get("yarn_attn_factor"),
        truncate=truncate,
        stated=stated,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def read_gemma4_rope(top: Fields, head_dim: int) -> Rope:
    """The RoPE of the full-attention layers of a Gemma 4 drafter, whose default is proportional."""
    fields = top.object("rope_parameters")
    if fields is None:
        values = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        fields = Fields(values, "rope_parameters.")
    fields = fields.object("full_attention") or fields
    known = {"rope_type", "partial_rotary_factor", "rope_theta", "factor", "full_attention"}
    fields.only(frozenset(known | {"sliding_attention"}), "RoPE")
    rope_type = fields.string("rope_type")
    if rope_type not in ("default", "proportional"):
        fields.refuse("rope_type", "'default' or 'proportional'")
    if fields.number("factor") not in (None, 1.0):
        fields.refuse("factor", "1 or none")
    share = fields.number("partial_rotary_factor")
    if rope_type == "default":
        if share not in (None, 1.0):
            fields.refuse("partial_rotary_factor", "1 or none for the RoPE type 'default'")
        share = 1.0
    share = 0.25 if share is None else share
    n_rot = _share(fields, "partial_rotary_factor", head_dim, share)
    theta = fields.number("rope_theta")
    kind: RopeType = "default" if rope_type == "default" else "proportional"
    return Rope(kind, theta, head_dim, n_rot, partial=False, interleaved=False)


def _of_all_layers(fields: Fields, top: Fields, *, sliding: bool) -> Fields:
    """The RoPE of every layer: a drafter's file can state only one."""
    full, local = fields.object("full_attention"), fields.object("sliding_attention")
    if full is None and local is None:
        name, theta = "rope_local_base_freq", top.number("rope_local_base_freq")
        shared = fields.number("rope_theta") or top.number("rope_theta")
        if sliding and theta is not None and theta != shared:
            top.refuse(name, f"the theta of all layers, {shared}: a drafter has one RoPE")
        return fields
    if full is not None and local is not None and dict(full.values) != dict(local.values):
        fields.refuse("sliding_attention", "what full_attention is: a drafter has one RoPE")
    return full or local or fields


def _type(fields: Fields) -> tuple[str, RopeType]:
    """The field that names the type, and the type."""
    name = "rope_type" if fields.raw("rope_type") is not None else "type"
    found = (fields.string(name) or "default").lower()
    kind = next((known for known in _TYPES if found == known), None)
    return name, kind or fields.refuse(name, "'default', 'linear', 'yarn' or 'llama3'")


def _rotated(fields: Fields, top: Fields, head_dim: int) -> tuple[int, bool]:
    name = "partial_rotary_factor"
    owner = stating(name, fields, top)
    share = owner.number(name)
    if share is None:
        return head_dim, False
    return _share(owner, name, head_dim, share), True


def _share(owner: Fields, name: str, head_dim: int, share: float) -> int:
    n_rot = int(head_dim * share) if share <= 1.0 else 0
    if n_rot < 2 or n_rot % 2 or not math.isclose(n_rot, head_dim * share, abs_tol=1e-3):
        owner.refuse(name, f"a share of head_dim {head_dim} that is a positive even number")
    return n_rot


def _sections(fields: Fields) -> tuple[int, ...]:
    sections = fields.integers("mrope_section")
    if sections is None:
        return ()
    if not 1 <= len(sections) <= 4 or not any(sections):
        fields.refuse("mrope_section", "one to four whole numbers, not all of them 0")
    return tuple(sections + [0] * (4 - len(sections)))


def _yarn_fields(fields: Fields) -> dict[str, float]:
    """YaRN's fields as llama.cpp's converter names and orders them."""
    for name, fixed in _YARN_FIXED.items():
        value = fields.number(name, positive=False)
        if value is not None and value != fixed:
            fields.refuse(name, f"{fixed:g} or none: llama.cpp uses that value for drafters")
    amplitude = "attention_factor" if "attention_factor" in fields.values else "attn_factor"
    names = {
        "yarn_ext_factor": "extrapolation_factor",
        "yarn_attn_factor": amplitude,
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    found = {key: fields.number(name) for key, name in names.items()}
    return {key: value for key, value in found.items() if value is not None}


def _untruncated_factors(rope: Rope) -> tuple[float, ...]:
    """Factors that undo the rounding of YaRN's ramp, which llama.cpp always does."""
    rounded, exact = _yarn_shares(rope, truncate=True), _yarn_shares(rope, truncate=False)
    return tuple(float(factor) for factor in (rounded / exact).astype(np.float32))


def _yarn_shares(rope: Rope, *, truncate: bool) -> NDArray[np.float64]:
    """The factor by which YaRN multiplies each of the `head_dim / 2` frequencies."""
    context, theta = rope.original_context, 10000.0 if rope.theta is None else rope.theta
    if rope.factor is None or context is None:
        refuse("rope_scaling", None, "factor and original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        """The dimension that makes so many rotations within the trained context."""
        turns = context / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension(_YARN_FIXED["beta_fast"]), dimension(_YARN_FIXED["beta_slow"])
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    ramp = (np.arange(rope.head_dim // 2) - low) / max(0.001, high - low)
    kept: NDArray[np.float64] = 1.0 - np.clip(ramp, 0.0, 1.0)
    return kept + (1.0 - kept) / rope.factor


def _llama3_factors(rope: Rope) -> tuple[float, ...]:
    """Llama 3.1's frequency factors, in 32-bit floats as llama.cpp's converter computes them."""
    if rope.factor is None or rope.original_context is None:
        refuse("rope_scaling", None, "factor and original_max_position_embeddings")
    theta = 10000.0 if rope.theta is None else rope.theta
    dims = np.arange(0, rope.head_dim, 2, dtype=np.float32) / np.float32(rope.head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(theta), dims)
    low_wavelength = rope.original_context / rope.low_freq_factor
    high_wavelength = rope.original_context / rope.high_freq_factor
    factors: list[float] = []
    for wavelength in np.float32(2 * math.pi) / frequencies:
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(float(np.float32(rope.factor)))
        else:
            smooth = np.float32(rope.original_context) / wavelength
            smooth = smooth - np.float32(rope.low_freq_factor)
            smooth = smooth / np.float32(rope.high_freq_factor - rope.low_freq_factor)
            mixed = (np.float32(1.0) - smooth) / np.float32(rope.factor) + smooth
            factors.append(float(np.float32(1.0) / mixed))
    return tuple(factors)
