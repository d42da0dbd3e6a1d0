"""Reuse of prefixes: a prompt's beginning comes from its slot, another slot, or the store. A slot's
tokens stay or are stored when its sequence ends, or its cells are needed.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from dflash_local.draft.drafter import Drafter
from dflash_local.engine.request import Request
from dflash_local.engine.slots import Slot, Slots
from dflash_local.errors import InputError
from dflash_local.prefixes.checkpoints import Checkpoints
from dflash_local.prefixes.prefix import Prefix, SavedSequence, Wanted
from dflash_local.prefixes.reuse import LEAST_GAIN, Holder, choose, common_prefix, worth_keeping
from dflash_local.prefixes.store import Found, PrefixStore
from dflash_local.target_model.images import n_cells
from dflash_local.target_model.target import StateCheckpoint

_LENT = 2
"""One in so many bytes of the store may be checkpoints of slots. With more, a long text would not
find room in the store when it leaves its slot."""

Origin = Literal["slot", "shared", "memory", "disk", "none"]
"""The origin of a prompt's beginning: the slot itself, another slot, the store in memory or on
disk, or nowhere."""


class PrefixCache:
    """Gives out slots with the part of a prompt that they can keep, and takes them back."""

    def __init__(self, slots: Slots, store: PrefixStore) -> None:
        """`store` keeps prefixes that leave their slots, as far as it has room."""
        self.store = store
        self.reused: dict[Origin, int] = {"slot": 0, "shared": 0, "memory": 0, "disk": 0, "none": 0}
        """The number of prompts that began with tokens of each origin."""
        self._slots = slots
        self._target = slots.target
        self._clock = 0
        room = store.max_bytes // _LENT // len(slots)
        for slot in slots:
            slot.checkpoints = Checkpoints(room, least=slots.least)

    def take(self, wanted: Wanted, preferred: int | None = None) -> tuple[Slot, int]:
        """A free slot, busy from now on, and the number of the prompt's tokens in its caches.

        These tokens come from the slot itself, from another slot, which may be busy, or from the
        store: see `reuse.choose`. A handful of a longer prompt is not worth it. At most all but the
        last token are kept, as the logits of its row give the first one of the answer. The slot
        `preferred` is taken if it is free. Raises InputError if no slot is free.
        """
        if all(slot.busy for slot in self._slots):
            raise InputError(f"all {len(self._slots)} slots are busy; wait for one to end")
        usable, holders = self._in_slots(wanted)
        found = self._find(wanted)
        choice = choose(holders, _cells_of(found, wanted), preferred)
        entry = None
        if choice.source is None and found:
            entry = self.store.fetch(found)
            choice = choice if entry else choose(holders, preferred=preferred)
        slot = self._slots[choice.slot]
        length = found.n_usable if entry and found else usable[choice.source or 0]
        if choice.n_cells < LEAST_GAIN and length < len(wanted.prompt) - 1:
            length = 0  # saves no time, and rows of another pass may round differently
        origin: Origin = "slot"
        if entry:
            origin = "disk" if found and found.is_on_disk else "memory"
            self._save(slot)
            self._restore(slot, entry)
        elif choice.source is not None and choice.source != slot.seq:
            origin = "shared"
            self._save(slot)
            self._slots.share(self._slots[choice.source], slot, usable[choice.source])
        else:
            self._save(slot, length)
        # What it has now may be more, or less where taking it over has failed.
        self._slots.roll_back(slot, length, for_drafts=wanted.drafts_in(slot.gave_up))
        self.reused[origin if slot.cached else "none"] += 1
        slot.busy = True
        slot.gave_up = False
        slot.owner = wanted.owner
        slot.n_read = len(slot.cached)
        return slot, len(slot.cached)

    def is_at_hand(self, wanted: Wanted, preferred: int | None = None) -> bool:
        """Whether `take`, with the same arguments, need not wait for the disk. If it must, a thread
        begins to read."""
        found = self._find(wanted)
        if found is None or not found.is_on_disk:
            return True
        choice = choose(self._in_slots(wanted)[1], _cells_of(found, wanted), preferred)
        return choice.source is not None or self.store.is_at_hand(found)

    def catch_up(self, slot: Slot, prompt: Sequence[int], *, for_drafts: bool) -> int:
        """Let a slot in the middle of a prompt take over the part that another slot has decoded.

        Returns the number of these cells. `for_drafts` as for `take`.
        """
        for_drafts = for_drafts and self._slots.drafter is not None
        wanted = Wanted(prompt, for_drafts, owner=slot.owner)
        length, source = 0, slot
        for other in self._slots:
            if other is slot or not other.cached:
                continue
            n = self._n_usable(other, wanted)
            if wanted.for_drafts:
                n = self._slots.n_drafted_from(other, n)
            n = self._slots.reach(other, n, copied=True)
            if n > length:
                length, source = n, other
        gain = self._slots.n_cells(source, length) - self._slots.n_cells(slot)
        if gain < LEAST_GAIN:
            return 0
        if not self._target.sees(source.seq, length):  # its window has moved past them
            return 0
        self._slots.share(source, slot, length)
        return gain

    def give_back(self, slot: Slot, *, gave_up: bool = False) -> None:
        """Free a slot whose sequence has ended. The drafter gets the rows it lacks, so that both
        caches end at the same token. `gave_up`: the drafter needs no more."""
        if gave_up:
            slot.gave_up = True
            slot.pending = []
        slot.busy = False
        self._used(slot)
        self._slots.inject(slot)

    def _used(self, slot: Slot) -> None:
        """Others are to be emptied or overwritten before this slot."""
        self._clock += 1
        slot.last_use = self._clock

    def make_room(self, n: int) -> None:
        """Empty free slots, the least recently used first, until n cells are free."""
        idle = sorted((s for s in self._slots if not s.busy and s.cached), key=lambda s: s.last_use)
        for slot in idle:
            if self._slots.free_cells >= n:
                return
            self._save(slot)
            self._slots.forget(slot)

    def saved(self, slot: Slot) -> SavedSequence:
        """All that a free slot has. Raises InputError if that is nothing, or cannot be saved."""
        entry = self._saved(slot, self._prefix(slot)) if slot.cached else None
        if entry is None:
            raise InputError(f"slot {slot.seq} has nothing that can be saved")
        return entry

    def put_back(self, slot: Slot, entry: SavedSequence) -> None:
        """Replace the content of a free slot by a saved sequence. Raises InputError if that fails,
        which leaves the slot empty."""
        self._save(slot)
        self._restore(slot, entry)
        if not slot.cached:
            raise InputError(f"what was saved does not fit slot {slot.seq}")
        slot.owner = entry.owner
        self._used(slot)

    def clear(self) -> None:
        """Empty all free slots, and the store with its files."""
        self._slots.forget_all()
        self.store.clear()

    def close(self) -> None:
        """Save the prefixes worth it on disk, if the store has one. Safe to call again."""
        if self.store.spills and self._target.is_open:
            for slot in sorted(self._slots, key=lambda slot: slot.last_use):
                if not slot.busy:
                    self._save(slot)
                    self._slots.forget(slot)
        self.store.close()

    def checkpoint_at(self, slot: Slot, request: Request) -> int | None:
        """The next length at which `keep_checkpoint` should be called while a slot decodes the
        prompt of a request."""
        if not self._target.keeps_checkpoints:
            return None
        images = [(at + image.n_positions, image.n_more) for at, image in request.images.items()]
        return slot.checkpoints.wanted(len(slot.cached), len(request.prompt), images)

    def keep_checkpoint(self, slot: Slot) -> None:
        """Let other texts fork off from the present content of a slot."""
        with suppress(MemoryError):
            slot.checkpoints.keep(self._target.checkpoint(slot.seq, len(slot.cached)))
        self._reserve()

    def _reserve(self) -> None:
        """Tell the store the room that the checkpoints of slots take."""
        kept = (each for slot in self._slots for each in slot.checkpoints.at_boundaries)
        self.store.reserve(sum({id(each): each.state.nbytes for each in kept}.values()))

    # What slots and the store have of a prompt

    def _in_slots(self, wanted: Wanted) -> tuple[list[int], list[Holder]]:
        """The number of a prompt's tokens that can be had from each slot, and the slots' content.
        One that is busy can only be copied from. The others are cut, or go on as they are."""
        usable = [
            self._slots.reach(slot, self._n_usable(slot, wanted), copied=slot.busy)
            for slot in self._slots
        ]
        return usable, [self._holder(slot, n) for slot, n in zip(self._slots, usable, strict=True)]

    def _n_usable(self, slot: Slot, wanted: Wanted) -> int:
        """The number of a prompt's tokens in a slot, with those that the drafter can still get."""
        drafter = self._slots.drafter
        n_drafter = drafter.length(slot.seq) + len(slot.pending) if drafter else 0
        return wanted.n_usable(slot.cached, n_drafter, slot.gave_up, slot.owner)

    def _holder(self, slot: Slot, n_usable: int) -> Holder:
        n_cells = partial(self._slots.n_cells, slot)
        n_shared = n_cells(self._n_elsewhere(slot))
        return Holder(n_cells(), n_cells(n_usable), n_shared, slot.busy, slot.last_use)

    def _n_elsewhere(self, slot: Slot) -> int:
        """The number of first tokens of a slot that another slot of its owner has, too."""
        others = (o for o in self._slots if o is not slot and o.owner == slot.owner)
        return max((common_prefix(slot.cached, other.cached) for other in others), default=0)

    def _find(self, wanted: Wanted) -> Found | None:
        """The best stored sequence for a prompt, if there is room for it."""
        found = self.store.find(wanted)
        return found if found and found.prefix.n_cells <= self._slots.room else None

    def _restore(self, slot: Slot, entry: SavedSequence) -> None:
        """Replace the content of a slot by a saved sequence. If that fails, the slot is empty."""
        self._slots.forget(slot)
        self.make_room(entry.n_cells)
        if not self._target.restore_saved(slot.seq, entry.target, entry.tokens):
            return
        slot.cached = list(entry.tokens)
        if self._target.keeps_checkpoints:
            slot.checkpoints.take(map(StateCheckpoint, entry.checkpoints, entry.states))
            self.keep_checkpoint(slot)
        slot.gave_up = entry.gave_up
        drafter = self._slots.drafter
        if drafter and len(entry.drafter):
            with self._slots.drafter_may_fail():
                drafter.restore(slot.seq, entry.drafter)

    def _save(self, slot: Slot, n_kept: int = 0) -> None:
        """Save a slot, if worth it, before it loses all but its first `n_kept` tokens. A slot that
        cannot be cut anywhere is saved as it was at its last checkpoint, with the ones before."""
        store, n = self.store, len(slot.cached)
        is_whole = self._slots.can_cut(slot, 1)
        if not is_whole:
            n = max((checkpoint.length for checkpoint in slot.checkpoints.all), default=0)
        n_kept = max(n_kept, self._n_elsewhere(slot))
        before, after = (self._slots.n_cells(slot, length) for length in (n, n_kept))
        if not store.max_bytes or not worth_keeping(before - after, before):
            return
        prefix = self._prefix(slot, n)
        if store.has(prefix):
            return
        if not is_whole:
            self._slots.roll_back(slot, n, for_drafts=False)
        if len(slot.cached) != n or self._target.sequence_bytes(slot.seq) > store.max_bytes:
            return
        entry = self._saved(slot, prefix)
        if entry is None:
            return
        slot.checkpoints.cut(n_kept)
        self._reserve()
        if not store.put(entry):  # then without them
            store.put(replace(entry, checkpoints=(), states=()))

    def _prefix(self, slot: Slot, n: int | None = None) -> Prefix:
        """The first n tokens of a slot, or all, as they would be saved."""
        n = len(slot.cached) if n is None else n
        is_whole = self._slots.can_cut(slot, 1)
        drafter = self._saving_drafter
        return Prefix(
            slot.cached[:n],
            (n - 1 if 0 < self._target.n_swa < n else 0) if is_whole else n,
            min(drafter.length(slot.seq), n) if drafter else 0,
            slot.gave_up,
            () if is_whole else tuple(c.length for c in slot.checkpoints.all if c.length < n),
            slot.owner,
        )

    def _saved(self, slot: Slot, prefix: Prefix) -> SavedSequence | None:
        """A slot, which has the tokens of `prefix`, as it is saved. None if that fails."""
        drafter = self._saving_drafter
        kept = {c.length: c.state for c in slot.checkpoints.all}
        states = tuple(kept[length] for length in prefix.checkpoints)
        try:
            state = self._target.save(slot.seq)
            rows = drafter.save(slot.seq) if drafter else np.empty(0, np.uint8)
        except MemoryError:
            return None
        if not len(state):
            return None
        return SavedSequence(**vars(prefix), target=state, drafter=rows, states=states)

    @property
    def _saving_drafter(self) -> Drafter | None:
        drafter = self._slots.drafter
        return drafter if drafter and drafter.saves_rows else None


def _cells_of(found: Found | None, wanted: Wanted) -> tuple[int, int] | None:
    """The cells of a stored sequence that the prompt can use, and all of them."""
    if found is None:
        return None
    return n_cells(wanted.prompt[: found.n_usable]), found.prefix.n_cells
