"""What DFlash 2 and DSpark add to DFlash: convolutions and a selector, a Markov head."""

from __future__ import annotations

from dataclasses import dataclass

from .families import SPECULATORS, Kind
from .fields import refuse


@dataclass(frozen=True)
class Selector:
    """DFlash 2's convolutions around each sublayer, and its choice of a path."""

    conv_kernel_size: int
    conv_group_size: int
    rank: int
    top_k: int


@dataclass(frozen=True)
class Markov:
    """DSpark's head, which biases a row by the token before it."""

    rank: int | None  # None = as many as the tensors have
    sample_from_anchor: bool  # the anchor's own row drafts a token


def read_selector(kind: Kind, n_embd: int) -> Selector | None:
    """DFlash 2's additions, None for other families. Raises FileError naming the field."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    if kind.family != "dflash2":
        for name in names:
            if kind.nested.raw(name) is not None:
                kind.nested.refuse(name, f"none for the architecture {kind.architecture}")
        return None
    selector = Selector(*(kind.nested.need_integer(name) for name in names))
    if n_embd % selector.conv_group_size:
        kind.nested.refuse("conv_group_size", f"a divisor of hidden_size, {n_embd}")
    if selector.top_k * (selector.top_k + 1) > n_embd:
        # llama.cpp hands the scores over in a row of hidden states
        kind.nested.refuse("selector_top_k", f"a number n with n * (n + 1) up to {n_embd}")
    return selector


def read_markov(kind: Kind) -> Markov | None:
    """DSpark's additions, None for other families. Raises FileError naming the field."""
    rank = kind.nested.integer("markov_rank", 0)
    for name in ("markov_rank", "dspark_markov_rank"):
        rank = kind.top.integer(name, 0) if rank is None else rank
    stated = kind.top.boolean("sample_from_anchor")
    stated = kind.nested.boolean("sample_from_anchor") if stated is None else stated
    if kind.family != "dspark":
        if rank:
            refuse("markov_rank", rank, f"none for the architecture {kind.architecture}")
        if stated:
            refuse("sample_from_anchor", stated, "false or none for a DFlash drafter")
        return None
    if rank == 0:
        refuse("markov_rank", rank, "a number above 0 for a DSpark drafter")
    owner = kind.nested if kind.nested.raw("markov_head_type") is not None else kind.top
    if owner.string("markov_head_type") not in (None, "vanilla"):
        owner.refuse("markov_head_type", "'vanilla'")
    bonus = kind.top.boolean("dspark_bonus_anchor")
    if stated is None and bonus is not None:
        stated = not bonus
    if stated is None:
        counts_inputs = kind.top.raw("aux_hidden_state_layer_ids") is not None
        stated = not counts_inputs and kind.layout != SPECULATORS
    return Markov(rank, stated)
