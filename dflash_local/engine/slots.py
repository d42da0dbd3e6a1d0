"""Slots: the sequences in the caches of target and drafter, and which cells each one has.

The drafter knows rows once they are injected. Until then their hidden states are in the target's
store. In a round, `Slots.commit` is the only place that adds to what a slot has cached. Between
requests, `share` and `PrefixCache` fill slots, `roll_back` cuts and `forget` empties them.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dflash_local.draft.drafter import Drafter
from dflash_local.engine.shared_cells import SharedCells
from dflash_local.llama import native
from dflash_local.prefixes.checkpoints import Checkpoints
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.images import Embeddings, spoken, whole
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target

_ASIDE_S = 60.0
"""How long to do without a drafter that has failed. Without a pause, what fails at some length of
the text is tried again with each request, and takes its time."""


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
    n_read: int = 0
    """So many of `cached` were read as a prompt. The rows of answers, after them, were computed in
    other passes."""
    busy: bool = False
    last_use: int = 0
    owner: str = ""
    """Whose text it has: requests of others take nothing of it."""
    gave_up: bool = False
    """Drafting was given up here, so the drafter has fewer tokens than the target."""


class Slots:
    """The slots of a target and, if there is one, a drafter. It keeps the two caches in step."""

    def __init__(
        self, target: Target, drafter: Drafter | None, n_seq: int, *, least: int = 1
    ) -> None:
        """Slots are cut to multiples of `least` tokens."""
        self.target = target
        self.drafter = drafter
        """None without one, and while it is put aside."""
        self.failure: str | None = None
        """Why the drafter was put aside last, if it ever was."""
        self.least = least
        self._aside: Drafter | None = None
        self._back_at = 0.0
        self._slots = [Slot(seq) for seq in range(n_seq)]
        self._shared = SharedCells()
        self.n_passes = 0
        """Passes of the target so far."""
        self.n_in_passes = 0
        """How many slots had rows in these, added up."""
        self.longest = 0
        """The most cells that a slot ever had."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, seq: int) -> Slot:
        return self._slots[seq]

    @property
    def free_cells(self) -> int:
        """Free cells of all slots."""
        return self.target.n_ctx_all - self._shared.n_used([self.n_cells(s) for s in self._slots])

    @property
    def room(self) -> int:
        """Cells that are free once all free slots are emptied."""
        busy = [self.n_cells(slot) if slot.busy else 0 for slot in self._slots]
        return self.target.n_ctx_all - self._shared.n_used(busy)

    def n_left(self, slot: Slot) -> int:
        """Cells that a slot may still take, if they are free."""
        return self.target.n_ctx - self.n_cells(slot)

    def n_cells(self, slot: Slot, length: int | None = None) -> int:
        """Cells that the first `length` tokens of a slot take, or all of them."""
        return self.target.n_cells(slot.seq, len(slot.cached) if length is None else length)

    @property
    def depth(self) -> int:
        """Cells of all busy slots, each slot's counted for itself."""
        return sum(self.n_cells(slot) for slot in self._slots if slot.busy)

    @property
    def drafter_suspended(self) -> bool:
        """Whether a drafter that has failed is put aside."""
        return self._aside is not None

    def forget(self, slot: Slot) -> None:
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

    # Passes of the target

    def decode(self, batch: Batch) -> None:
        """One batch through the target. See `Target.run`."""
        self._keep_stored(len(batch))
        self.target.run(batch)
        self._count(1, len(batch.parts))

    def decode_image(
        self, slot: Slot, image: Embeddings, tokens: Sequence[int], *, features: bool
    ) -> None:
        """Decode an image and commit its ids. Of more rows than positions, the drafter gets the
        hidden states of some, evenly spaced: its text has one row for each position."""
        begin, n, n_rows = len(slot.cached), len(tokens), len(image.rows)
        for first in range(0, n_rows, self.target.n_batch):
            rows = range(first, min(first + self.target.n_batch, n_rows))
            self._keep_stored(len(rows))
            self.target.decode_image(slot.seq, begin, image, rows, n)
            self._count(1, 1)
            held = [i for i in range(n) if i * n_rows // n in rows]
            chosen = [i * n_rows // n - first for i in held]
            self.commit(slot, [tokens[i] for i in held], chosen, features=features)

    def decode_ahead(
        self,
        slots: Sequence[Slot],
        anchors: Sequence[int],
        n_steps: int,
        draws: Sequence[native.TokenDraw | None],
        given: Sequence[int],
    ) -> list[list[int]]:
        """Several plain steps of these slots at once. See `Target.decode_ahead`."""
        self._keep_stored(n_steps * len(slots))
        positions, seqs = [len(slot.cached) for slot in slots], [slot.seq for slot in slots]
        steps = self.target.decode_ahead(anchors, positions, seqs, n_steps, draws, given)
        self._count(len(steps), len(slots))
        return steps

    def _count(self, n_passes: int, n_slots: int) -> None:
        self.n_passes += n_passes
        self.n_in_passes += n_passes * n_slots

    def commit(
        self, slot: Slot, tokens: Sequence[int], rows: Iterable[int], *, features: bool
    ) -> None:
        """Note that rows of the last `decode` or `decode_ahead` stay in a slot's cache, and hold
        these tokens.

        `features`: the drafter will need their hidden states. Otherwise, or when it lacks earlier
        ones, pending rows are dropped: the drafter cannot go on after a gap.
        """
        if features and self.can_draft(slot):
            slot.pending += [self.target.feature_rows[row] for row in rows]
        else:
            slot.pending = []
        slot.cached += tokens
        self.longest = max(self.longest, self.n_cells(slot))

    def _keep_stored(self, n_rows: int) -> None:
        """Inject pending rows that the next `n_rows` would overwrite in the target's store."""
        if not self.target.n_features:
            return  # the drafter reads tokens
        lost = self.target.n_decoded + n_rows - self.target.native.n_stored
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
    def drafter_may_fail(self) -> Iterator[None]:
        """Put the drafter aside for an error that it raises in here."""
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

    def try_drafter_again(self) -> None:
        if self._aside is not None and time.monotonic() >= self._back_at:
            self.drafter, self._aside = self._aside, None

    def take_features(self, slot: Slot) -> StoredFeatures:
        """Hand over the hidden states that the drafter lacks. The next draft injects them. The ids
        of images are no tokens, so another one stands in their place."""
        pending, slot.pending = slot.pending, []
        tokens = spoken(slot.cached[len(slot.cached) - len(pending) :])
        return StoredFeatures(self.target, pending, tokens)

    def inject(self, slot: Slot) -> None:
        """Inject what the drafter lacks of a slot."""
        if slot.pending and self.drafter:
            with self.drafter_may_fail():
                self.drafter.inject(slot.seq, self.take_features(slot))

    # Cut and share

    def roll_back(self, slot: Slot, length: int, *, for_drafts: bool) -> None:
        """Cut both caches to a common length, at most `length`."""
        length = min(length, len(slot.cached))
        if self.drafter and for_drafts:
            # Rows that only the target has are decoded again for their hidden states.
            length = self.n_drafted_from(slot, min(length, self.drafter.length(slot.seq)))
        length = self.reach(slot, length, copied=False)
        if self.drafter:
            self.drafter.truncate(slot.seq, length)
        if length < len(slot.cached):
            if not self._cut(slot, length):
                self.forget(slot)
                return
            del slot.cached[length:]
            self._shared.cut(slot.seq, self.n_cells(slot))
        if not self.target.sees(slot.seq, len(slot.cached)):
            self.forget(slot)

    def n_drafted_from(self, slot: Slot, length: int) -> int:
        """`length`, or a window less if the drafter has lost much of the window that ends there.

        The tokens of that window are then decoded again.
        """
        if self.drafter is None or not self.drafter.draft_window or not self.drafter.saves_rows:
            return length
        wanted = min(length, self.drafter.draft_window)
        seen = self.drafter.n_visible(slot.seq, length)
        return length if 4 * seen >= 3 * wanted else length - wanted

    def can_cut(self, slot: Slot, length: int) -> bool:
        """Whether a slot can be cut to its first `length` tokens, one or more, as it is now."""
        return length >= self.target.shortest(slot.seq)

    def reach(self, slot: Slot, length: int, *, copied: bool) -> int:
        """The most tokens, at most `length`, that can be kept of a slot when it is cut, or that
        another slot can get if they are `copied`. No image is cut."""
        if self.least > 1:
            length = min(length, slot.n_read) if copied else length
            length -= length % self.least
        length = whole(slot.cached, length)
        if not (self.target.can_copy(slot.seq, length) if copied else self.can_cut(slot, length)):
            checkpoint = slot.checkpoints.longest(length)
            length = checkpoint.length if checkpoint else 0
        return 0 if length % self.least else length  # an image or a checkpoint may lie between

    def _cut(self, slot: Slot, length: int) -> bool:
        """Cut the target's cache to a length within `reach`. False: it cannot, or it is empty."""
        slot.checkpoints.cut(length)
        if not length or self.can_cut(slot, length):
            return self.target.truncate(slot.seq, length)
        checkpoint = slot.checkpoints.longest(length)
        if checkpoint is None or checkpoint.length != length:
            return False
        return self.target.restore(slot.seq, checkpoint)

    def share(self, source: Slot, slot: Slot, length: int) -> None:
        """Let a slot share the first tokens of another one, in place of its own."""
        self.forget(slot)
        length = self.reach(source, length, copied=True)
        if not length:
            return
        checkpoints = [c for c in source.checkpoints.all if c.length <= length]
        at = None if self.target.can_copy(source.seq, length) else checkpoints[-1]
        try:
            if not self.target.copy(source.seq, slot.seq, length, at):
                return
        except MemoryError:
            return
        slot.checkpoints.take(checkpoints)
        if not self.target.options.has_streams:
            self._shared.share(source.seq, slot.seq, self.n_cells(source, length))
        slot.cached, slot.n_read = source.cached[:length], length
        slot.gave_up = source.gave_up
        self.inject(source)
        if self.drafter:
            with self.drafter_may_fail():
                n = min(length, self.drafter.length(source.seq))
                self.drafter.copy(source.seq, slot.seq, n)
