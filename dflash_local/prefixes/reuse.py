"""The choice of a slot for a prompt, and of a source for the prompt's cached beginning.

The prompt reuses the longest prefix that is found anywhere. If possible it destroys nothing that
somebody may come back to: a short request does not replace a long chat while another slot is free.
Pure: it knows only numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_KEPT = 64
"""A text with fewer tokens is not kept: it is decoded again just as fast."""
LEAST_GAIN = 16
"""Tokens that copying from another slot must save at least."""


@dataclass(frozen=True)
class Holder:
    """The content of a slot, in cells of the target's cache.

    `n_usable`: those of the prompt that can be taken over from it. `n_shared`: those at its own
    beginning that another slot has, too.
    """

    n_cached: int
    n_usable: int
    n_shared: int = 0
    busy: bool = False
    last_use: int = 0


@dataclass(frozen=True)
class Reuse:
    """Slot `slot` takes the prompt. Its first `n_cells` cells come from slot `source`, which may be
    the same, or from the store if that is None."""

    slot: int
    source: int | None
    n_cells: int


def worth_keeping(n_lost: int, n_cached: int) -> bool:
    """Whether a sequence that is about to lose its last `n_lost` cells should be saved.

    Saving it costs room and time for all `n_cached` cells. But decoding a token costs far more
    than copying it, so losing an eighth is enough.
    """
    return n_lost >= LEAST_KEPT and 8 * n_lost >= n_cached


def worth_restoring(n_usable: int, n_more: int, n_stored: int) -> bool:
    """Whether to put back a stored sequence of `n_stored` cells, of which the first `n_usable` can
    be used. These are `n_more` more than a slot has."""
    return n_more >= LEAST_KEPT and 16 * n_usable >= n_stored


def choose(
    holders: Sequence[Holder], stored: tuple[int, int] | None = None, preferred: int | None = None
) -> Reuse:
    """Choose a slot, and the prefix to copy into it. At least one slot must not be busy.

    `stored`: the number of usable cells of the best stored sequence, and of all of them. The slot
    `preferred` is taken if it is not busy.
    """
    free = [i for i, holder in enumerate(holders) if not holder.busy]
    free = [preferred] if preferred in free else free
    source = max(range(len(holders)), key=lambda i: (holders[i].n_usable, i in free))
    best = holders[source].n_usable
    from_store = False
    if stored is not None:
        from_store = worth_restoring(stored[0], stored[0] - best, stored[1])

    def in_place(i: int) -> bool:
        return not from_store and holders[i].n_usable + LEAST_GAIN > best

    now = 1 + max(holder.last_use for holder in holders)

    def price(i: int) -> tuple[bool, bool, float]:
        """The cost of beginning in slot i. Lost tokens count less the longer they have not been
        used."""
        holder = holders[i]
        kept = max(holder.n_shared, holder.n_usable if in_place(i) else 0)
        n_lost = holder.n_cached - kept
        destroys = worth_keeping(n_lost, holder.n_cached)
        return destroys, not in_place(i), n_lost / (now - holder.last_use)

    slot = min(free, key=price)
    if from_store and stored is not None:
        return Reuse(slot, None, stored[0])
    if in_place(slot):
        return Reuse(slot, slot, holders[slot].n_usable)
    return Reuse(slot, source, best)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens at the common beginning of two sequences of the same type."""
    n = min(len(a), len(b))
    begin = 0
    while begin < n and a[begin : begin + _STEP] == b[begin : begin + _STEP]:
        begin += _STEP
    for i in range(min(begin, n), n):
        if a[i] != b[i]:
            return i
    return n


_STEP = 256  # comparing slices is faster than comparing tokens in Python
