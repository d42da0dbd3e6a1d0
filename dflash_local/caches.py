"""The caches of target and drafter, which N sequences share: who has what, and what has room."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash_local import target_state
from dflash_local.branches import Lines
from dflash_local.drafter import Drafter, SavesRows
from dflash_local.errors import DflashError, InputError
from dflash_local.features import StoredFeatures
from dflash_local.prefix_entry import Entry, Prefix
from dflash_local.prefix_store import Found, PrefixStore
from dflash_local.reuse import LEAST_GAIN, Holder, choose, common_prefix, worth_keeping
from dflash_local.sequence import Slot
from dflash_local.shared_cells import SharedCells
from dflash_local.target import Target

Origin = Literal["slot", "shared", "memory", "disk", "none"]
"""Where the beginning of a prompt came from: the slot that took it, another one, the store."""


@dataclass(frozen=True)
class _Wants:
    """A prompt, and whether the drafter must have what is kept of it; see `Caches.take`."""

    prompt: list[int]
    tokens: NDArray[np.int32]
    for_drafts: bool
    unless_resigned: bool

    def drafts_in(self, resigned: bool) -> bool:
        return self.for_drafts and not (self.unless_resigned and resigned)


class Caches:
    """Slots of a target and, if there is one, a drafter, kept in step with one another.

    The drafter learns of rows when they are injected; until then the target's store has them.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        n_seq: int,
        store: PrefixStore | None = None,
    ) -> None:
        """`store` takes in what leaves its slot."""
        self.target = target
        self.drafter = drafter
        self.store = store
        self.slots = [Slot(seq) for seq in range(n_seq)]
        self.reused: dict[Origin, int] = {"slot": 0, "shared": 0, "memory": 0, "disk": 0, "none": 0}
        """How many prompts began with what came from where."""
        self._shared = SharedCells()
        self._rows = drafter if isinstance(drafter, SavesRows) else None
        self._n_decoded = 0  # rows, by the numbers of the target's store
        self._clock = 0

    @property
    def free_cells(self) -> int:
        """Of the one cache that all slots share."""
        return self.target.n_ctx - self._shared.n_used([len(slot.cached) for slot in self.slots])

    @property
    def depth(self) -> int:
        """Cached tokens of the slots at work."""
        return sum(len(slot.cached) for slot in self.slots if slot.busy)

    def take(
        self, prompt: List[int], *, for_drafts: bool, unless_resigned: bool = False
    ) -> tuple[Slot, int]:
        """A free slot, busy from now on, and how many tokens of the prompt are in its caches.

        These come from the slot itself, from another one, which may be at work, or from the store:
        see `reuse.choose`. At most `len(prompt) - 1` are kept, as the last row's logits give the
        first token. `for_drafts` keeps only what the drafter has too; `unless_resigned` leaves a
        slot in which drafting was given up as it is, the drafter behind the target. Raises
        InputError when no slot is free.
        """
        if all(slot.busy for slot in self.slots):
            raise InputError(f"all {len(self.slots)} slots are busy; wait for one to end")
        for_drafts = for_drafts and self.drafter is not None
        wants = _Wants(list(prompt), np.asarray(prompt, np.int32), for_drafts, unless_resigned)
        holders = [self._holder(slot, wants) for slot in self.slots]
        found = self._find(wants)
        choice = choose(holders, (found.n_usable, len(found.prefix)) if found else None)
        entry = None
        if choice.source is None and found and self.store:
            entry = self.store.fetch(found)
            choice = choice if entry else choose(holders)
        slot = self.slots[choice.slot]
        origin: Origin = "slot"
        if entry:
            origin = "disk" if found and found.is_on_disk else "memory"
            self._keep(slot)
            self._restore(slot, entry)
        elif choice.source not in (None, slot.seq):
            origin = "shared"
            self._keep(slot)
            self._share(self.slots[choice.source or 0], slot, choice.length)
        else:
            self._keep(slot, choice.length)
        self.roll_back(slot, choice.length, for_drafts=wants.drafts_in(slot.resigned))
        self.reused[origin if slot.cached else "none"] += 1
        slot.busy = True
        slot.resigned = False
        return slot, len(slot.cached)

    def catch_up(self, slot: Slot, prompt: List[int], *, for_drafts: bool) -> int:
        """Let a slot that is reading a prompt take over what another one has come to have of it in
        the meantime; how many tokens that is. `for_drafts` as `take` has it."""
        for_drafts = for_drafts and self.drafter is not None
        others = [other for other in self.slots if other is not slot and other.cached]
        usable = {other.seq: self._n_usable(other, prompt, for_drafts) for other in others}
        if for_drafts:
            usable = {o.seq: self._n_drafted_from(o, usable[o.seq]) for o in others}
        source = max(others, key=lambda other: usable[other.seq], default=None)
        gain = usable[source.seq] - len(slot.cached) if source else 0
        if source is None or gain < LEAST_GAIN:
            return 0
        if not self.target.sees(source.seq, usable[source.seq]):  # its windows have moved on
            return 0
        self._share(source, slot, usable[source.seq])
        return gain

    def _n_usable(self, slot: Slot, prompt: List[int], for_drafts: bool) -> int:
        """How many tokens of a prompt a slot has, and where that matters the drafter too."""
        n = min(common_prefix(slot.cached, prompt), len(prompt) - 1)
        if self.drafter and for_drafts:
            n = min(n, self.drafter.length(slot.seq) + len(slot.pending))
        return 0 if n < len(slot.cached) and not self.target.can_roll_back else n

    def _holder(self, slot: Slot, wants: _Wants) -> Holder:
        n = self._n_usable(slot, wants.prompt, wants.drafts_in(slot.resigned))
        return Holder(len(slot.cached), n, self._n_elsewhere(slot), slot.busy, slot.last_use)

    def _n_elsewhere(self, slot: Slot) -> int:
        """How many tokens of a slot some other slot begins with, too."""
        others = (other for other in self.slots if other is not slot)
        return max((common_prefix(slot.cached, other.cached) for other in others), default=0)

    def _share(self, source: Slot, slot: Slot, length: int) -> None:
        """A slot takes over the first tokens of another one, which has them still."""
        self.forget(slot)
        self.target.copy(source.seq, slot.seq, length)
        self._shared.share(source.seq, slot.seq, length)
        slot.cached = source.cached[:length]
        slot.resigned = source.resigned
        if self.drafter:
            pending = source.pending
            try:
                self.inject(source)
            except DflashError:  # the source's own affair, when its turn comes
                source.pending = pending
            n = min(length, self.drafter.length(source.seq))
            self.drafter.copy(source.seq, slot.seq, n)

    def _find(self, wants: _Wants) -> Found | None:
        """What the store has of a prompt, if there is room for it."""
        if self.store is None:
            return None
        found = self.store.find(
            wants.tokens, for_drafts=wants.for_drafts, unless_resigned=wants.unless_resigned
        )
        busy = [len(slot.cached) if slot.busy else 0 for slot in self.slots]
        if found and len(found.prefix) > self.target.n_ctx - self._shared.n_used(busy):
            return None
        return found

    def _restore(self, slot: Slot, entry: Entry) -> None:
        """A saved sequence in place of what a slot has; nothing where that fails."""
        self.forget(slot)
        self.make_room(len(entry))
        if not target_state.restore(self.target.context, slot.seq, entry.target):
            return
        slot.cached = entry.tokens.tolist()
        slot.resigned = entry.resigned
        if self._rows and len(entry.drafter):
            try:
                self._rows.restore(slot.seq, entry.drafter)
            except DflashError:
                self._rows.truncate(slot.seq, 0)

    def _keep(self, slot: Slot, n_kept: int = 0) -> None:
        """Save a slot that is to lose all but its first tokens, if that is worth it."""
        store, n = self.store, len(slot.cached)
        n_kept = max(n_kept, self._n_elsewhere(slot))
        if store is None or not worth_keeping(n - n_kept, n) or not self.target.can_roll_back:
            return
        prefix = Prefix(
            np.asarray(slot.cached, np.int32),
            n - 1 if 0 < self.target.n_swa < n else 0,
            self._rows.length(slot.seq) if self._rows else 0,
            slot.resigned,
        )
        context = self.target.context
        if store.has(prefix) or target_state.n_bytes(context, slot.seq) > store.max_bytes:
            return
        try:
            state = target_state.save(context, slot.seq)
            rows = self._rows.save(slot.seq) if self._rows else np.empty(0, np.uint8)
        except MemoryError:
            return
        if len(state):
            store.put(Entry(**vars(prefix), target=state, drafter=rows))

    def forget_all(self) -> None:
        """Empty all free slots, and the store with its files."""
        for slot in self.slots:
            if not slot.busy:
                self.forget(slot)
        if self.store is not None:
            self.store.clear()

    def close(self) -> None:
        """Spill what is worth it to the disk, if the store has one. Safe to call again."""
        if self.store is None:
            return
        if self.store.spills and self.target.is_open:
            for slot in sorted(self.slots, key=lambda slot: slot.last_use):
                if not slot.busy:
                    self._keep(slot)
                    self.forget(slot)
        self.store.close()

    def give_back(self, slot: Slot) -> None:
        """A slot whose sequence has ended, its caches brought to one token, if need be emptied.

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
            self._keep(slot)
            self.forget(slot)

    def decode(
        self,
        tokens: List[int],
        positions: List[int],
        seq_ids: List[int],
        output: List[bool],
        lines: Lines | None = None,
    ) -> None:
        """One batch through the target. See `Target.decode`."""
        self._keep_stored(len(tokens))
        self.target.decode(tokens, positions, seq_ids, output, lines)
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
                length = self._n_drafted_from(slot, min(length, self.drafter.length(slot.seq)))
            self.drafter.truncate(slot.seq, length)
        if length < len(slot.cached):
            if not self.target.truncate(slot.seq, length):
                self.forget(slot)
                return
            del slot.cached[length:]
            self._shared.cut(slot.seq, length)
        if not self.target.sees(slot.seq, len(slot.cached)):
            self.forget(slot)

    def _n_drafted_from(self, slot: Slot, length: int) -> int:
        """Fewer tokens, where the drafter's window has lost much of what it looked at after
        `length` of them: those of a window are decoded again."""
        window = getattr(self.drafter, "draft_window", 0)
        if not window or self._rows is None:
            return length
        wanted = min(length, window)
        seen = self._rows.n_visible(slot.seq, length)
        return length if 4 * seen >= 3 * wanted else length - wanted

    def forget(self, slot: Slot) -> None:
        """Empty a slot."""
        slot.cached.clear()
        slot.pending = []
        slot.resigned = False
        self._shared.cut(slot.seq, 0)
        self.target.clear(slot.seq)
        if self.drafter:
            self.drafter.truncate(slot.seq, 0)
