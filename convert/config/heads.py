"""The additions of two families to DFlash: DFlash 2 convolutions and a selector, DSpark a Markov
head."""

from .families import SPECULATORS, ConfigFields
from .fields import refuse, stating

_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def selector_keys(config: ConfigFields) -> dict[str, int]:
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


def read_markov(config: ConfigFields) -> tuple[int | None, bool | None]:
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
