"""The caches of target and drafter, which N sequences share: who has what, and what has room."""

from __future__ import annotations

from collections.abc import Sequence as List

from dflash_local.drafter import Drafter
from dflash_local.errors import InputError
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
        self._clock = 0

    @property
    def free_cells(self) -> int:
        """Of the one cache that all slots share."""
        return self.target.n_ctx - sum(len(slot.cached) for slot in self.slots)

    @property
    def depth(self) -> int:
        """Cached tokens of the slots at work."""
        return sum(len(slot.cached) for slot in self.slots if slot.busy)

    def take(
        self, prompt: List[int], *, for_drafts: bool, unless_resigned: bool = False
    ) -> tuple[Slot, int]:
        """A free slot, busy from now on, and how many tokens of the prompt are in its caches.

        It is the one that has most of the prompt, the least recently used among equals; at most
        `len(prompt) - 1` tokens are kept, as the last row's logits give the first token. `for_drafts`
        keeps only what the drafter has too; `unless_resigned` leaves a slot in which drafting was
        given up as it is, the drafter behind the target. Raises InputError when no slot is free.
        """
        free = [slot for slot in self.slots if not slot.busy]
        if not free:
            raise InputError(f"all {len(self.slots)} slots are busy; wait for one to end")
        slot = max(free, key=lambda slot: (slot.common_prefix(prompt), -slot.last_use))
        n_common = min(slot.common_prefix(prompt), len(prompt) - 1)
        if unless_resigned and slot.resigned:
            for_drafts = False
        self.roll_back(slot, n_common, for_drafts=for_drafts)
        slot.busy = True
        slot.resigned = False
        return slot, len(slot.cached)

    def give_back(self, slot: Slot) -> None:
        """A slot whose sequence has ended, its caches brought to the same token, if need be emptied.

        Raises what the drafter raises.
        """
        slot.busy = False
        self._clock += 1
        slot.last_use = self._clock
        try:
            self.inject(slot)
        except BaseException:
            self.forget(slot)
            raise

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
