"""Where a prompt begins: which slot takes it, and from where the beginning of it comes.

The prompt takes the longest prefix that is found anywhere. It does so without destroying what
somebody may come back to, if it can: a short request does not take the place of a long chat while
there is another. Pure: knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_KEPT = 64
"""Tokens that are sooner decoded again than kept."""
LEAST_GAIN = 16
"""Tokens that a copy of a slot must spare."""


@dataclass(frozen=True)
class Holder:
    """What a slot has, in tokens.

    `n_usable`: of the prompt, what could be taken over; `n_shared`: of its content, the beginning
    that some other slot has, too.
    """

    n_cached: int
    n_usable: int
    n_shared: int = 0
    busy: bool = False
    last_use: int = 0


@dataclass(frozen=True)
class Reuse:
    """Slot `slot` takes the prompt, of which it has `length` tokens: out of slot `source`, which
    may be itself; out of the store where that is None."""

    slot: int
    source: int | None
    length: int


def worth_keeping(n_lost: int, n_cached: int) -> bool:
    """Whether a sequence whose last `n_lost` tokens are about to go should be kept whole.

    That costs the room and the time of all `n_cached`; to decode tokens costs far more than to copy
    them, so that an eighth is enough.
    """
    return n_lost >= LEAST_KEPT and 8 * n_lost >= n_cached


def worth_restoring(n_usable: int, n_more: int, n_stored: int) -> bool:
    """Whether a stored sequence of `n_stored` tokens is put back for the sake of its first
    `n_usable`, which are `n_more` than a slot has."""
    return n_more >= LEAST_KEPT and 16 * n_usable >= n_stored


def choose(holders: Sequence[Holder], stored: tuple[int, int] | None = None) -> Reuse:
    """Where to begin. Some slot is not busy.

    `stored`: of the best stored sequence, the usable tokens and how many there are in all.
    """
    free = [i for i, holder in enumerate(holders) if not holder.busy]
    source = max(range(len(holders)), key=lambda i: (holders[i].n_usable, i in free))
    best = holders[source].n_usable
    from_store = stored is not None and worth_restoring(stored[0], stored[0] - best, stored[1])

    def in_place(i: int) -> bool:
        return not from_store and holders[i].n_usable + LEAST_GAIN > best

    now = 1 + max(holder.last_use for holder in holders)

    def price(i: int) -> tuple[bool, bool, float]:
        """What it would cost to begin in slot i: tokens lost count less the longer nobody has come
        back to them."""
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
    """How many tokens two lists, or two of a kind, begin with in common."""
    n = min(len(a), len(b))
    begin = 0
    while begin < n and a[begin : begin + _STEP] == b[begin : begin + _STEP]:
        begin += _STEP
    for i in range(min(begin, n), n):
        if a[i] != b[i]:
            return i
    return n


_STEP = 256  # lists compare faster than Python does
