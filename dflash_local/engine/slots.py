"""Slots: the sequences in the caches of target and drafter, and which cells each one has.

The drafter knows rows once they are injected. Until then their hidden states are in the target's
store. In a round, `Slots.commit` is the only place that adds to what a slot has cached.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dflash_local.draft.drafter import Drafter
from dflash_local.engine.checkpoints import Checkpoints
from dflash_local.engine.prefix import Entry, Prefix, Wanted
from dflash_local.engine.prefixes import Found, PrefixStore
from dflash_local.engine.reuse import (
    LEAST_GAIN,
    Holder,
    choose,
    common_prefix,
    worth_keeping,
)
from dflash_local.engine.shared_cells import SharedCells
from dflash_local.errors import InputError
from dflash_local.llama import native
from dflash_local.target.batch import Batch
from dflash_local.target.taps import StoredFeatures
from dflash_local.target.target import Checkpoint, Target

_ASIDE_S = 60.0
"""How long to do without a drafter that has failed. Without a pause, what fails at some length of
the text is tried again with each request, and takes its time."""

_LENT = 2
"""One in so many bytes of the store may be checkpoints of slots. With more, a long text would not
find room in the store when it leaves its slot."""

Origin = Literal["slot", "shared", "memory", "disk", "none"]
"""Where the beginning of a prompt came from: the slot itself, another slot, the store in memory or
on disk, or nowhere."""


@dataclass
class Slot:
    """One sequence of target and drafter, and what their caches hold.

    `cached` are the tokens in the target's cache by position. The drafter has the first
    `drafter.length(seq)` of them. While a sequence drafts, `pending` are the other rows, as their
    numbers in the target's store of hidden states.
    """

    seq: int
    cached: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """Of a recurrent state after some of `cached`: where other texts may fork off."""
    busy: bool = False
    last_use: int = 0
    gave_up: bool = False
    """Drafting was given up here, so the drafter has fewer tokens than the target."""


class Slots:
    """The slots of a target and, if there is one, a drafter. It keeps the two caches in step."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        n_seq: int,
        store: PrefixStore | None = None,
        *,
        least: int = 1,
    ) -> None:
        """`store` keeps what leaves its slot; None: nothing does. Slots are cut to multiples of
        `least` tokens."""
        self.target = target
        self.drafter = drafter
        """None while it is put aside."""
        self.failure: str | None = None
        """Why the drafter was put aside last, if it ever was."""
        self.store = store or PrefixStore(0)
        self._least = least
        self._aside: Drafter | None = None
        self._back_at = 0.0
        room = self.store.max_bytes // _LENT // n_seq
        self._slots = [
            Slot(seq, checkpoints=Checkpoints(room, least=least)) for seq in range(n_seq)
        ]
        self.reused: dict[Origin, int] = {"slot": 0, "shared": 0, "memory": 0, "disk": 0, "none": 0}
        """How many prompts began with tokens of each origin."""
        self._shared = SharedCells()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, seq: int) -> Slot:
        return self._slots[seq]

    @property
    def free_cells(self) -> int:
        """Free cells of the cache that all slots share."""
        return self.target.n_ctx - self._shared.n_used([len(slot.cached) for slot in self._slots])

    @property
    def depth(self) -> int:
        """Cached tokens of all busy slots together."""
        return sum(len(slot.cached) for slot in self._slots if slot.busy)

    @property
    def lacks_drafter(self) -> bool:
        """Whether a drafter that has failed is put aside."""
        return self._aside is not None

    # A slot's life

    def take(
        self, prompt: Sequence[int], *, for_drafts: bool, unless_gave_up: bool = False
    ) -> tuple[Slot, int]:
        """A free slot, busy from now on, and how many tokens of the prompt its caches have.

        These tokens come from the slot itself, from another slot, which may be busy, or from the
        store: see `reuse.choose`. A handful of a longer prompt is not worth it. At most
        `len(prompt) - 1` are kept, as the logits of the last row give the first token. `for_drafts`
        keeps only what the drafter has, too. `unless_gave_up` makes an exception for slots in which
        drafting was given up: they keep what the target has. Raises InputError if no slot is free.
        """
        if all(slot.busy for slot in self._slots):
            raise InputError(f"all {len(self._slots)} slots are busy; wait for one to end")
        self._try_drafter_again()
        for_drafts = for_drafts and self.drafter is not None
        wanted = Wanted(list(prompt), for_drafts, unless_gave_up)
        holders = [self._holder(slot, wanted) for slot in self._slots]
        found = self._find(wanted)
        choice = choose(holders, (found.n_usable, len(found.prefix)) if found else None)
        entry = None
        if choice.source is None and found:
            entry = self.store.fetch(found)
            choice = choice if entry else choose(holders)
        slot, length = self._slots[choice.slot], choice.length
        if length < LEAST_GAIN and length < len(prompt) - 1:
            length = 0  # saves no time, and rows of another pass may round differently
        origin: Origin = "slot"
        if entry:
            origin = "disk" if found and found.is_on_disk else "memory"
            self._save(slot)
            self._restore(slot, entry)
        elif choice.source not in (None, slot.seq):
            origin = "shared"
            self._save(slot)
            self._share(self._slots[choice.source or 0], slot, choice.length)
        else:
            self._save(slot, length)
        self.roll_back(slot, length, for_drafts=wanted.drafts_in(slot.gave_up))
        self.reused[origin if slot.cached else "none"] += 1
        slot.busy = True
        slot.gave_up = False
        return slot, len(slot.cached)

    def catch_up(self, slot: Slot, prompt: Sequence[int], *, for_drafts: bool) -> int:
        """Let a slot in the middle of a prompt take over what another slot has decoded of it.

        Returns how many tokens that is. `for_drafts` as for `take`.
        """
        wanted = Wanted(prompt, for_drafts and self.drafter is not None)
        length, source = 0, slot
        for other in self._slots:
            if other is slot or not other.cached:
                continue
            n = self._n_usable(other, wanted)
            if wanted.for_drafts:
                n = self._n_drafted_from(other, n)
            n = self._reach(other, n, copied=True)
            if n > length:
                length, source = n, other
        gain = length - len(slot.cached)
        if gain < LEAST_GAIN:
            return 0
        if not self.target.sees(source.seq, length):  # its window has moved past them
            return 0
        self._share(source, slot, length)
        return gain

    def give_back(self, slot: Slot, *, gave_up: bool = False) -> None:
        """Free a slot whose sequence has ended. The drafter gets what it lacks, so that both caches
        end at the same token. `gave_up`: the drafter needs no more."""
        if gave_up:
            slot.gave_up = True
            slot.pending = []
        slot.busy = False
        self._clock += 1
        slot.last_use = self._clock
        self.inject(slot)

    def forget(self, slot: Slot) -> None:
        """Empty a slot."""
        slot.cached.clear()
        slot.pending = []
        slot.checkpoints.cut(0)
        slot.gave_up = False
        self._shared.cut(slot.seq, 0)
        self.target.clear(slot.seq)
        if self.drafter:
            self.drafter.truncate(slot.seq, 0)

    def forget_all(self) -> None:
        """Empty all free slots."""
        for slot in self._slots:
            if not slot.busy:
                self.forget(slot)

    def clear(self) -> None:
        """Empty all free slots, and the store with its files."""
        self.forget_all()
        self.store.clear()

    def make_room(self, n: int) -> None:
        """Empty free slots, the least recently used first, until n cells are free."""
        idle = sorted((s for s in self._slots if not s.busy and s.cached), key=lambda s: s.last_use)
        for slot in idle:
            if self.free_cells >= n:
                return
            self._save(slot)
            self.forget(slot)

    def close(self) -> None:
        """Save what is worth saving on disk, if the store has one. Safe to call again."""
        if self.store.spills and self.target.is_open:
            for slot in sorted(self._slots, key=lambda slot: slot.last_use):
                if not slot.busy:
                    self._save(slot)
                    self.forget(slot)
        self.store.close()

    # Passes of the target

    def decode(self, batch: Batch) -> None:
        """One batch through the target. See `Target.run`."""
        self._keep_stored(self.target.n_rows(batch))
        self.target.run(batch)

    def settle(self, slots: Iterable[Slot]) -> None:
        """Decode now what the next passes over these slots would decode again."""
        slots = list(slots)
        self._keep_stored(sum(self.target.n_again(slot.seq) for slot in slots))
        try:
            self.target.settle(slot.seq for slot in slots)
        except BaseException:
            for slot in slots:  # what was to be decoded again is lost
                self.forget(slot)
            raise

    def decode_ahead(
        self,
        slots: Sequence[Slot],
        anchors: Sequence[int],
        n_steps: int,
        draws: Sequence[native.TokenDraw | None],
        given: Sequence[int],
    ) -> list[list[int]]:
        """Several plain steps of these slots at once. See `Target.decode_ahead`."""
        n_again = sum(self.target.n_again(slot.seq) for slot in slots)
        self._keep_stored(n_again + n_steps * len(slots))
        positions, seqs = [len(slot.cached) for slot in slots], [slot.seq for slot in slots]
        return self.target.decode_ahead(anchors, positions, seqs, n_steps, draws, given)

    def commit(
        self, slot: Slot, tokens: Sequence[int], rows: Iterable[int], *, features: bool
    ) -> None:
        """Note that rows of the last pass stay in a slot's cache, and hold these tokens.

        `features`: the drafter will need their hidden states. Otherwise, or when it lacks earlier
        ones, pending rows are dropped: the drafter cannot go on after a gap.
        """
        if features and self.can_draft(slot):
            slot.pending += [self.target.numbers[row] for row in rows]
        else:
            slot.pending = []
        slot.cached += tokens

    def checkpoint_at(self, slot: Slot, n_prompt: int) -> int | None:
        """The next length at which `keep_checkpoint` should be called while a slot decodes a
        prompt."""
        if not self.target.keeps_checkpoints:
            return None
        return slot.checkpoints.wanted(len(slot.cached), n_prompt)

    def keep_checkpoint(self, slot: Slot) -> None:
        """Let other texts fork off from what a slot has now."""
        self.settle([slot])
        with suppress(MemoryError):
            slot.checkpoints.keep(self.target.checkpoint(slot.seq, len(slot.cached)))
        self._lend()

    def _lend(self) -> None:
        """Let the store know what the checkpoints of slots take of its room."""
        kept = (each for slot in self._slots for each in slot.checkpoints.at_boundaries)
        self.store.lend(sum({id(each): each.state.nbytes for each in kept}.values()))

    def _keep_stored(self, n_rows: int) -> None:
        """Inject pending rows that the next `n_rows` would overwrite in the target's store."""
        lost = self.target.n_decoded + n_rows - self.target.n_stored
        for slot in self._slots:
            if slot.pending and slot.pending[0] < lost:
                self.inject(slot)

    # What the drafter knows

    def can_draft(self, slot: Slot) -> bool:
        """Whether the drafter has all that the target has of a slot, or can still get it."""
        if self.drafter is None:
            return False
        return self.drafter.length(slot.seq) + len(slot.pending) == len(slot.cached)

    @contextmanager
    def _drafter_may_fail(self) -> Iterator[None]:
        """What the drafter raises in here puts it aside."""
        try:
            yield
        except Exception as error:
            self.put_aside(error)

    def put_aside(self, error: Exception) -> None:
        """The drafter has failed: drop its rows, and let all answers go on plainly. A later
        request tries it again."""
        drafter, self.drafter = self.drafter, None
        if drafter is None:
            raise error
        self._aside, self._back_at = drafter, time.monotonic() + _ASIDE_S
        self.failure = f"the drafter failed: {str(error) or type(error).__name__}"
        for slot in self._slots:
            slot.pending = []
            drafter.truncate(slot.seq, 0)

    def _try_drafter_again(self) -> None:
        if self._aside is not None and time.monotonic() >= self._back_at:
            self.drafter, self._aside = self._aside, None

    def take_features(self, slot: Slot) -> StoredFeatures:
        """Hand over the hidden states that the drafter lacks. The next draft injects them."""
        pending, slot.pending = slot.pending, []
        return StoredFeatures(self.target, pending)

    def inject(self, slot: Slot) -> None:
        """Inject what the drafter lacks of a slot."""
        if slot.pending and self.drafter:
            with self._drafter_may_fail():
                self.drafter.inject(slot.seq, self.take_features(slot))

    def roll_back(self, slot: Slot, length: int, *, for_drafts: bool) -> None:
        """Cut both caches to a common length, at most `length`."""
        length = min(length, len(slot.cached))
        if self.drafter and for_drafts:
            # Rows that only the target has are decoded again for their hidden states.
            length = self._n_drafted_from(slot, min(length, self.drafter.length(slot.seq)))
        length = self._reach(slot, length - length % self._least, copied=False)
        if length % self._least:  # a checkpoint of a recurrent state
            length = 0
        if self.drafter:
            self.drafter.truncate(slot.seq, length)
        if length < len(slot.cached):
            if not self._cut(slot, length):
                self.forget(slot)
                return
            del slot.cached[length:]
            self._shared.cut(slot.seq, length)
        if not self.target.sees(slot.seq, len(slot.cached)):
            self.forget(slot)

    def _n_drafted_from(self, slot: Slot, length: int) -> int:
        """`length`, or a window less if the drafter has lost much of the window that ends there.

        The tokens of that window are then decoded again.
        """
        if self.drafter is None or not self.drafter.draft_window or not self.drafter.saves_rows:
            return length
        wanted = min(length, self.drafter.draft_window)
        seen = self.drafter.n_visible(slot.seq, length)
        return length if 4 * seen >= 3 * wanted else length - wanted

    # Where a prompt's beginning comes from

    def _n_usable(self, slot: Slot, wanted: Wanted) -> int:
        """How many tokens of a prompt a slot has, with those that the drafter can still get."""
        n_drafter = self.drafter.length(slot.seq) + len(slot.pending) if self.drafter else 0
        return wanted.n_usable(slot.cached, n_drafter, slot.gave_up)

    def _can_cut(self, slot: Slot, length: int) -> bool:
        """Whether a slot can be cut to its first `length` tokens, one or more, as it is now."""
        return length >= self.target.shortest(slot.seq)

    def _reach(self, slot: Slot, length: int, *, copied: bool) -> int:
        """The most tokens, at most `length`, that can be kept of a slot when it is cut, or that
        another slot can get if they are `copied`."""
        if self.target.can_copy(slot.seq, length) if copied else self._can_cut(slot, length):
            return length
        checkpoint = slot.checkpoints.longest(length)
        return checkpoint.length if checkpoint else 0

    def _cut(self, slot: Slot, length: int) -> bool:
        """Cut the target's cache to a length within `_reach`. False: it cannot, or it is empty."""
        slot.checkpoints.cut(length)
        if not length or self._can_cut(slot, length):
            return self.target.truncate(slot.seq, length)
        checkpoint = slot.checkpoints.longest(length)
        if checkpoint is None or checkpoint.length != length:
            return False
        return self.target.restore(slot.seq, checkpoint)

    def _holder(self, slot: Slot, wanted: Wanted) -> Holder:
        # A slot that is busy can only be copied from. The others are cut, or go on as they are.
        n = self._reach(slot, self._n_usable(slot, wanted), copied=slot.busy)
        return Holder(len(slot.cached), n, self._n_elsewhere(slot), slot.busy, slot.last_use)

    def _n_elsewhere(self, slot: Slot) -> int:
        """How many tokens at the beginning of a slot some other slot has, too."""
        others = (other for other in self._slots if other is not slot)
        return max((common_prefix(slot.cached, other.cached) for other in others), default=0)

    def _share(self, source: Slot, slot: Slot, length: int) -> None:
        """Let a slot share the first tokens of another one, in place of its own."""
        self.forget(slot)
        length = self._reach(source, length, copied=True)
        if not length:
            return
        checkpoints = [c for c in source.checkpoints.all if c.length <= length]
        at = None if self.target.can_copy(source.seq, length) else checkpoints[-1]
        if not self.target.copy(source.seq, slot.seq, length, at):
            return
        slot.checkpoints.take(checkpoints)
        self._shared.share(source.seq, slot.seq, length)
        slot.cached = source.cached[:length]
        slot.gave_up = source.gave_up
        self.inject(source)
        if self.drafter:
            with self._drafter_may_fail():
                n = min(length, self.drafter.length(source.seq))
                self.drafter.copy(source.seq, slot.seq, n)

    def _find(self, wanted: Wanted) -> Found | None:
        """The best stored sequence for a prompt, if there is room for it."""
        found = self.store.find(wanted)
        busy = [len(slot.cached) if slot.busy else 0 for slot in self._slots]
        if found and len(found.prefix) > self.target.n_ctx - self._shared.n_used(busy):
            return None
        return found

    def _restore(self, slot: Slot, entry: Entry) -> None:
        """Replace what a slot has by a saved sequence. If that fails, the slot is empty."""
        self.forget(slot)
        self.make_room(len(entry))
        if not self.target.restore_saved(slot.seq, entry.target, len(entry)):
            return
        slot.cached = list(entry.tokens)
        if self.target.keeps_checkpoints:
            slot.checkpoints.take(map(Checkpoint, entry.checkpoints, entry.states))
            self.keep_checkpoint(slot)
        slot.gave_up = entry.gave_up
        if self.drafter and len(entry.drafter):
            with self._drafter_may_fail():
                self.drafter.restore(slot.seq, entry.drafter)

    def _save(self, slot: Slot, n_kept: int = 0) -> None:
        """Save a slot, if worth it, before it loses all but its first `n_kept` tokens. A slot that
        cannot be cut anywhere is saved as it was at its last checkpoint, with the ones before."""
        store, n = self.store, len(slot.cached)
        is_whole = self._can_cut(slot, 1)
        checkpoints = [] if is_whole else slot.checkpoints.all
        if not is_whole:
            n = checkpoints.pop().length if checkpoints else 0
        n_kept = max(n_kept, self._n_elsewhere(slot))
        if not store.max_bytes or not worth_keeping(n - n_kept, n):
            return
        drafter = self.drafter if self.drafter and self.drafter.saves_rows else None
        prefix = Prefix(
            slot.cached[:n],
            (n - 1 if 0 < self.target.n_swa < n else 0) if is_whole else n,
            min(drafter.length(slot.seq), n) if drafter else 0,
            slot.gave_up,
            tuple(checkpoint.length for checkpoint in checkpoints),
        )
        if store.has(prefix):
            return
        if not is_whole:
            self.roll_back(slot, n, for_drafts=False)
        self.settle([slot])
        if len(slot.cached) != n or self.target.sequence_bytes(slot.seq) > store.max_bytes:
            return
        try:
            state = self.target.save(slot.seq)
            rows = drafter.save(slot.seq) if drafter else np.empty(0, np.uint8)
        except MemoryError:
            return
        if not len(state):
            return
        slot.checkpoints.cut(n_kept)
        self._lend()
        states = tuple(checkpoint.state for checkpoint in checkpoints)
        entry = Entry(**vars(prefix), target=state, drafter=rows, states=states)
        if not store.put(entry):  # then without them
            store.put(replace(entry, checkpoints=(), states=()))
