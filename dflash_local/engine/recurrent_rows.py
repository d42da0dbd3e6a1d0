"""The part of a round that only recurrent targets need: rows that are decoded again, and passes in
which all sequences have equally many rows. For other targets there are none, and nothing is done.

Where a recurrent state cannot be taken back row by row, the rows that a round accepts are decoded
again: in the next pass over their sequence, before its new rows, or in a pass of their own where
that would become too long.
"""

from __future__ import annotations

from dflash_local.controller.controller import Controller
from dflash_local.engine.choice import Choice
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slot, Slots


class RecurrentRows:
    """Rows of the sequences of a round besides those that they ask for."""

    def __init__(self, slots: Slots, controller: Controller | None) -> None:
        self._slots = slots
        self._target = slots.target
        self._controller = controller

    def n_again(self, sequences: list[Sequence]) -> int:
        """How many rows the next pass decodes again."""
        if not self._target.most_again:
            return 0
        return sum(self._target.n_again(s.slot.seq) for s in sequences)

    def too_many(self, sequences: list[Sequence]) -> bool:
        """Whether one sequence alone has so many that a plain step is better now than a draft."""
        n_again = self.n_again(sequences)
        return n_again > 0 and len(sequences) == 1 and n_again > self._most(1)

    def decode_again(self, sequences: list[Sequence], *, plain: bool = False) -> None:
        """Choose which rows to decode again now, in a pass of their own, and do it: those that
        would make the next pass too long; before `plain` steps of several sequences also those that
        would make their rows unequal."""
        if not self._target.most_again:
            return
        slots = [sequence.slot for sequence in sequences]
        again = [self._target.n_again(slot.seq) for slot in slots]
        now: list[Slot] = []
        n_rows = len(again) * (1 + max(again))
        # What is cached includes rows to decode again, but their cells are free already.
        if n_rows > self._slots.free_cells + sum(again) or (plain and len(set(again)) > 1):
            now = slots
        elif len(slots) > 1 and any(again):  # one alone decodes them again with a plain step
            most = self._most(len(slots))
            now = [slot for slot, n in zip(slots, again, strict=True) if n > most]
        self._slots.decode_again(now)
        if self._controller:
            left = self.n_again(sequences)
            self._controller.redecoded.done(sum(again) - left)
            self._controller.redecoded.now = left

    def _most(self, n_seqs: int) -> float:
        """Rows of a sequence that are decoded again together with a draft, at most."""
        most: float = self._target.most_again
        return min(most, self._controller.most_redecoded(n_seqs)) if self._controller else most

    def make_equal(self, choices: list[Choice]) -> None:
        """Give all as many rows as the widest, with those that are decoded again. Some have more
        drafts to fill theirs."""
        if not self._target.needs_equal_rows:
            return
        n = len(choices)
        again = [self._target.n_again(choice.sequence.slot.seq) for choice in choices]
        wanted = max(n_again + c.n_rows for n_again, c in zip(again, choices, strict=True))
        room = min((self._slots.free_cells + sum(again)) // n, self._target.n_batch // n)
        for n_again, choice in zip(again, choices, strict=True):
            choice.n_rows = min(wanted, room) - n_again
