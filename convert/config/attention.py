"""The shape of a drafter's attention: heads, windows, direction."""

from __future__ import annotations

from dataclasses import dataclass

from .families import SPECULATORS, ConfigFields

_MAX_HEADS = 1 << 16


@dataclass(frozen=True)
class Attention:
    """The attention of every layer; `windowed[i]`: layer i has the sliding window."""

    n_head: int
    n_head_kv: int
    states_kv: bool  # the config states n_head_kv
    head_dim: int
    states_dim: bool  # the config states head_dim
    window: int  # tokens, 0 = none
    windowed: tuple[bool, ...]
    causal: bool | None
    bias: bool  # of the projections of queries, keys, values and the output

    @property
    def n_q(self) -> int:
        """Width of the queries of all heads."""
        return self.n_head * self.head_dim

    @property
    def n_kv(self) -> int:
        """Width of the keys, and of the values, of all heads."""
        return self.n_head_kv * self.head_dim


def read_attention(config: ConfigFields, n_embd: int, n_layer: int) -> Attention:
    """The attention that the config states. Raises FileError naming the field."""
    layout, top = config.layout, config.top
    n_head = top.need_integer("num_attention_heads", 1, _MAX_HEADS)
    field = layout.n_head_kv
    n_head_kv = top.integer(field, 1, _MAX_HEADS)
    if n_head_kv is None and layout.gemma4:
        top.missing(field, "a whole number")
    if n_head % (n_head_kv or n_head):
        top.refuse(field, f"a divisor of num_attention_heads, {n_head}")
    head_dim, states_dim = _head_dim(config, n_embd, n_head)
    window, windowed = _sliding(config, n_layer)
    return Attention(
        n_head=n_head,
        n_head_kv=n_head_kv or n_head,
        states_kv=n_head_kv is not None,
        head_dim=head_dim,
        states_dim=states_dim,
        window=window,
        windowed=windowed,
        causal=_causal(config, windowed),
        bias=top.boolean("attention_bias") is True,
    )


def _head_dim(config: ConfigFields, n_embd: int, n_head: int) -> tuple[int, bool]:
    """The size of a head, and whether the config states it."""
    name = config.layout.head_dim
    value = config.top.integer(name, 2, 1 << 16)
    if value is None and config.layout.gemma4:
        config.top.missing(name, "a whole number")
    head_dim = n_embd // n_head if value is None else value
    if head_dim < 2 or head_dim % 2 or (value is None and n_embd % n_head):
        config.top.refuse(name, "an even number")
    if config.top.integer("v_head_dim") not in (None, head_dim):
        config.top.refuse("v_head_dim", f"{name}, {head_dim}")
    return head_dim, value is not None


def _sliding(config: ConfigFields, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    """The window in tokens (0 = none) and the layers that have it."""
    top, nested = config.top, config.nested
    types = top.strings("layer_types")
    if types is not None:
        _check_layer_types(config, types, n_layer)
    everywhere = nested.boolean("use_swa") is True
    window = nested.integer("swa_window_size", 0) or top.integer("sliding_window", 0) or 0
    if config.layout.types_set_window:
        used = types is not None
    else:
        used = everywhere or top.boolean("use_sliding_window") is True
    if everywhere and not window:
        nested.refuse("swa_window_size", "the window of use_swa")
    if not used or not window:
        return 0, (False,) * n_layer
    if everywhere:
        return window, (True,) * n_layer
    if types is None:
        # the types that `transformers` derives
        first = top.integer("max_window_layers", 0)
        if first is None:
            top.missing("layer_types", "the layers that have the sliding window")
        return window, tuple(layer >= first for layer in range(n_layer))
    return window, tuple(name == "sliding_attention" for name in types)


def _check_layer_types(config: ConfigFields, types: list[str], n_layer: int) -> None:
    known = {"full_attention"}
    if not config.layout.gemma4:
        known.add("sliding_attention")
    if len(types) != n_layer or not known.issuperset(types):
        names = " or ".join(sorted(known))
        config.top.refuse("layer_types", f"{n_layer} times {names}")


def _causal(config: ConfigFields, windowed: tuple[bool, ...]) -> bool | None:
    name = "sliding_window_non_causal"
    if config.family != "dspark" and config.layout == SPECULATORS and any(windowed):
        # In speculators, layers with a window are causal unless this says otherwise, others never.
        causal = config.top.boolean(name) is False
        if causal and not all(windowed):
            config.top.refuse(name, "true where only some layers have a window")
        return causal or None
    value = config.top.boolean("is_causal")
    return config.nested.boolean("causal") if value is None else value
