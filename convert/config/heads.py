"""What two families add to DFlash: DFlash 2 convolutions and a selector, DSpark a Markov head."""

from __future__ import annotations

from dataclasses import dataclass

from .families import SPECULATORS, ConfigFields
from .fields import refuse


@dataclass(frozen=True)
class Selector:
    """DFlash 2's convolutions around each sublayer, and its path selector."""

    conv_kernel_size: int
    conv_group_size: int
    rank: int
    top_k: int


@dataclass(frozen=True)
class Markov:
    """DSpark's head, which adds a bias for the token before to each row."""

    rank: int | None  # None: as the tensors have it; 0: there is no head
    sample_from_anchor: bool  # the row of the anchor drafts a token, too


def read_selector(config: ConfigFields, n_embd: int) -> Selector | None:
    """DFlash 2's additions, None for other families. Raises FileError naming the field."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    fields = config.top if config.layout == SPECULATORS else config.nested
    if config.family != "dflash2":
        for name in names:
            if fields.raw(name) is not None:
                fields.refuse(name, f"none for the architecture {config.architecture}")
        return None
    selector = Selector(*(fields.need_integer(name) for name in names))
    if n_embd % selector.conv_group_size:
        fields.refuse("conv_group_size", f"a divisor of hidden_size, {n_embd}")
    if selector.top_k * (selector.top_k + 1) > n_embd:
        # llama.cpp passes the scores on in a row of hidden states
        fields.refuse("selector_top_k", f"a number n with n * (n + 1) up to {n_embd}")
    return selector


def read_markov(config: ConfigFields) -> Markov | None:
    """DSpark's additions, None for other families. Raises FileError naming the field."""
    rank = config.nested.integer("markov_rank", 0)
    for name in ("markov_rank", "dspark_markov_rank"):
        rank = config.top.integer(name, 0) if rank is None else rank
    stated = config.top.boolean("sample_from_anchor")
    stated = config.nested.boolean("sample_from_anchor") if stated is None else stated
    if config.family != "dspark":
        if rank:
            refuse("markov_rank", rank, f"none for the architecture {config.architecture}")
        if stated:
            refuse("sample_from_anchor", stated, "false or none for a DFlash drafter")
        return None
    owner = config.nested if config.nested.raw("markov_head_type") is not None else config.top
    if owner.string("markov_head_type") not in (None, "vanilla"):
        owner.refuse("markov_head_type", "'vanilla'")
    bonus = config.top.boolean("dspark_bonus_anchor")
    if stated is None and bonus is not None:
        stated = not bonus
    if stated is None:
        counts_inputs = config.top.raw("aux_hidden_state_layer_ids") is not None
        stated = not counts_inputs and config.layout != SPECULATORS
    return Markov(rank, stated)
