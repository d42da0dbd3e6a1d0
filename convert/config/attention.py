"""The shape of a drafter's attention: heads, windows, direction."""

from ..key import Value
from .families import SPECULATORS, ConfigFields

_MAX_HEADS = 1 << 16


def read_heads(config: ConfigFields, n_embd: int) -> tuple[int, dict[str, Value | None]]:
    """The size of a head, and the keys of the heads, of which those are None that the config leaves
    open. Raises FileError naming the field."""
    layout, top = config.layout, config.top
    n_head = top.need_integer("num_attention_heads", 1, _MAX_HEADS)
    n_head_kv = top.integer(layout.n_head_kv, 1, _MAX_HEADS)
    if n_head_kv is None and layout.gemma4:
        top.missing(layout.n_head_kv, "a whole number")
    name = layout.head_dim
    stated = top.integer(name, 2, 1 << 16)
    if stated is None and layout.gemma4:
        top.missing(name, "a whole number")
    head_dim = n_embd // n_head if stated is None else stated
    if head_dim < 2 or head_dim % 2 or (stated is None and n_embd % n_head):
        top.refuse(name, "an even number")
    if top.integer("v_head_dim") not in (None, head_dim):
        top.refuse("v_head_dim", f"{name}, {head_dim}")
    return head_dim, {
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": stated,
        "attention.value_length": stated,
    }


def read_windows(config: ConfigFields, n_layer: int) -> tuple[int, tuple[bool, ...]]:
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


def read_causal(config: ConfigFields, windowed: tuple[bool, ...]) -> bool | None:
    """True if positions do not see the later ones; None if the config leaves it open."""
    name = "sliding_window_non_causal"
    if config.family != "dspark" and config.layout == SPECULATORS and any(windowed):
        # In speculators, layers with a window are causal unless this says otherwise, others never.
        causal = config.top.boolean(name) is False
        if causal and not all(windowed):
            config.top.refuse(name, "true where only some layers have a window")
        return causal or None
    value = config.top.boolean("is_causal")
    return config.nested.boolean("causal") if value is None else value
