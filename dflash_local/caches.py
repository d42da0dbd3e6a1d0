"""The caches of target and drafter, which N sequences share: who has what, and what has room."""

from __future__ import annotations

from collections.abc import Sequence as List

from dflash_local.drafter import Drafter
from dflash_local.features import StoredFeatures
from dflash_local.sequence import Slot
from dflash_local.target import Target


class Caches:
    """Slots of a target and, if there is one, a drafter, kept in step with one another.

    The drafter learns of rows when they are injected; until then the target's store has them.
    """

    def __init__(self, target: Target, drafter: Drafter | None, n_seq: int) -> None:
        self.target = target
        self.drafter = drafter
        self.slots = [Slot(seq) for seq in range(n_seq)]
        self._n_decoded = 0  # rows, by the numbers of the target's store

    @property
    def free_cells(self) -> int:
        """Of the one cache that all slots share."""
        return self.target.n_ctx - sum(len(slot.cached) for slot in self.slots)

    @property
    def depth(self) -> int:
        """Cached tokens of the slots at work."""
        return sum(len(slot.cached) for slot in self.slots if slot.busy)

    def make_room(self, n: int) -> None:
        """Empty free slots, the least recently used first, until n cells are free."""
        idle = sorted((s for s in self.slots if not s.busy and s.cached), key=lambda s: s.last_use)
        for slot in idle:
            if self.free_cells >= n:
                return
            self.forget(slot)

    def decode(
        self, tokens: List[int], positions: List[int], seq_ids: List[int], output: List[bool]
    ) -> None:
        """One batch through the target. Raises as `Target.decode`."""
        self._keep_stored(len(tokens))
        self.target.decode(tokens, positions, seq_ids, output)
        self._n_decoded = self.target.first_stored + len(tokens)

    def decode_ahead(
        self, tokens: List[int], positions: List[int], seq_ids: List[int], n_steps: int
    ) -> list[list[int]]:
        """Some plain steps at once. See `Target.decode_ahead`."""
        self._keep_stored(n_steps * len(tokens))
        steps = self.target.decode_ahead(tokens, positions, seq_ids, n_steps)
        self._n_decoded = self.target.first_stored + len(steps) * len(tokens)
        return steps

    def _keep_stored(self, n_rows: int) -> None:
        """Before so many rows: inject what they would overwrite in the target's store."""
        lost = self._n_decoded + n_rows - self.target.n_stored
        for slot in self.slots:
            if slot.pending and slot.pending[0] < lost:
                self.inject(slot)

    def inject(self, slot: Slot) -> None:
        """What the drafter lacks of a slot. Raises what the drafter raises."""
        pending, slot.pending = slot.pending, []
        if pending and self.drafter:
            self.drafter.inject(slot.seq, StoredFeatures(self.target, pending))

    def roll_back(self, slot: Slot, length: int, *, for_drafts: bool) -> None:
        """Both caches to a common length, at most `length`."""
        if self.drafter:
            if for_drafts:
                # Rows that only the target has must be decoded again for their hidden states.
                length = min(length, self.drafter.length(slot.seq))
            self.drafter.truncate(slot.seq, length)
        if length < len(slot.cached):
            if not self.target.truncate(slot.seq, length):
                self.forget(slot)
            else:
                del slot.cached[length:]

    def forget(self, slot: Slot) -> None:
        """Empty a slot."""
        slot.cached.clear()
        slot.pending = []
        slot.resigned = False
        self.target.clear(slot.seq)
        if self.drafter:
            self.drafter.truncate(slot.seq, 0)
