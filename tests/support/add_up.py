"""Sums that hold for the statistics of an answer with drafts of width "auto"."""

from dflash_local import Result
from dflash_local.engine.sequence import Sequence

N_NODES = 31
"""The most of a tree."""
LOT = ["by lot"]


def add_up(sequence: Sequence | Result) -> None:
    stats = sequence.stats
    assert stats.emitted == len(sequence.tokens)
    assert stats.rounds == sum(stats.widths.values()) == sum(stats.accepted_lengths.values())
    # One token is drawn from the prompt's last row, and each round draws one of its own.
    assert stats.emitted == 1 + stats.rounds + stats.accepted
    assert all(1 <= emitted <= 1 + drafted for drafted, emitted in stats.outcomes)
    assert all(1 <= width <= 1 + max(N_NODES, 15) for width in stats.widths)
    assert sum(stats.position_accepted) == stats.accepted
    if not stats.tree_rounds:
        assert all(width <= 16 for width in stats.widths)
        assert sum(stats.position_drafted) == stats.drafted
    for made, kept in zip(stats.position_drafted, stats.position_accepted, strict=True):
        assert made >= kept
    assert stats.drafting is not None and stats.drafting.startswith("drafting ")
    assert "\n" not in stats.drafting
