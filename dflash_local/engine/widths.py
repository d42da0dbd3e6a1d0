"""How wide a round is: what requests ask for, what fits, and what pays off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_local.copies.copier import Copier, Copy
from dflash_local.copies.join import copy_alone, heard, joined
from dflash_local.draft.draft import Draft
from dflash_local.engine.meter import TO_WARM_UP, Meter
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slot, Slots
from dflash_local.errors import GrammarError
from dflash_local.pays.chances import path_chances
from dflash_local.pays.controller import Controller
from dflash_local.pays.policy import Policy

_AHEAD_S, _MOST_AHEAD = 0.016, 16
"""The most plain steps in one call, in seconds, a screen's frame, and in number. More would delay
tokens on their way out, and a cancel. With one at a time, Python costs a small model a tenth of its
speed."""


@dataclass(frozen=True)
class Choice:
    """For each sequence of a round: how many tokens to draft (0 for none), how many nodes may be
    verified, and what its text offers to copy."""

    n_drafts: list[int]
    limits: list[int]
    copies: list[list[Copy]]

    @property
    def n_drafting(self) -> int:
        return sum(map(bool, self.n_drafts))

    @property
    def is_plain(self) -> bool:
        """Whether nothing at all is drafted."""
        return not (any(self.n_drafts) or any(self.copies))


class Widths:
    """Chooses widths. It asks the controller for the sequences of width "auto"."""

    def __init__(self, slots: Slots, meter: Meter, controller: Controller | None) -> None:
        self._slots = slots
        self._meter = meter
        self._controller = controller

    def most_nodes(self, sequence: Sequence) -> int:
        """The most nodes that a round may verify for a sequence, copies alone apart."""
        width = sequence.request.draft_width
        return sequence.shape.n_nodes if width == "auto" else max(width - 1, 0)

    def choose(self, sequences: list[Sequence]) -> Choice:
        """Choose before drafting. A fixed width is not reduced: that would need another graph."""
        self._notice_lost(sequences)
        limits, left = self._limits(sequences), self._left_to_controller(sequences)
        n_drafts = self._n_drafts(sequences, limits, left)
        copies = self._copies(sequences, limits, n_drafts, left)
        if self._controller and any(n_drafts) and any(copies):
            chosen = self._controller.without_sure(
                [policy for _, policy in left],
                [n_drafts[i] for i, _ in left],
                [copy_alone(copies[i])[1] for i, _ in left],
            )
            for (i, _), n in zip(left, chosen, strict=True):
                n_drafts[i] = n
        return Choice(n_drafts, limits, copies)

    def join(self, sequences: list[Sequence], drafts: list[Draft], choice: Choice) -> list[Draft]:
        """Join each draft with its copies, and cut it where verifying more would not pay off."""
        if choice.is_plain:
            return drafts
        if not any(choice.copies):
            return self._clip(sequences, drafts, choice)
        chances = self._chances(sequences, drafts, choice)
        drafts = list(drafts)
        for i, (sequence, copies) in enumerate(zip(sequences, choice.copies, strict=True)):
            if copies:
                drafts[i], chances[i] = self._joined(
                    sequence, drafts[i], chances[i], copies, choice.limits[i]
                )
        widths = [1 + len(draft) for draft in drafts]
        if self._controller and (left := self._left_to_controller(sequences)):
            rows = self._controller.rows(
                [chances[i] for i, _ in left], drafted=choice.n_drafting > 0
            )
            for (i, _), width in zip(left, rows, strict=True):
                widths[i] = width
        return self._cut(sequences, drafts, widths)

    def _clip(self, sequences: list[Sequence], drafts: list[Draft], choice: Choice) -> list[Draft]:
        """Cut drafts that no copies join."""
        widths = [1 + len(draft) for draft in drafts]
        left = self._left_to_controller(sequences)
        if self._controller and choice.n_drafting and left:
            rows = self._controller.widths(
                [policy for _, policy in left],
                [drafts[i] for i, _ in left],
                [choice.limits[i] for i, _ in left],
            )
            for (i, _), width in zip(left, rows, strict=True):
                widths[i] = width
        return self._cut(sequences, drafts, widths)

    def _cut(
        self, sequences: list[Sequence], drafts: list[Draft], widths: list[int]
    ) -> list[Draft]:
        """The first nodes of each draft, for so many rows with the anchor."""
        cut = [draft.clip(width - 1) for draft, width in zip(drafts, widths, strict=True)]
        if not self._slots.target.needs_equal_rows:
            return cut
        # All get as many rows as the widest. Some have more drafts to fill theirs.
        n_rows = self.least_rows(sequences, cut)
        return [draft.clip(n - 1) for draft, n in zip(drafts, n_rows, strict=True)]

    def least_rows(self, sequences: list[Sequence], drafts: list[Draft]) -> list[int]:
        """The least number of new rows that each sequence gets in a pass over these drafts."""
        target, n = self._slots.target, len(drafts)
        if not target.needs_equal_rows:
            return [1] * n
        again = [target.n_again(sequence.slot.seq) for sequence in sequences]
        wanted = max(n_again + 1 + len(d) for n_again, d in zip(again, drafts, strict=True))
        room = min((self._slots.free_cells + sum(again)) // n, target.n_batch // n)
        return [min(wanted, room) - n_again for n_again in again]

    def settle(self, sequences: list[Sequence], *, plain: bool = False) -> None:
        """Let the target decode again what would make the next pass too long; before `plain` steps
        of several sequences also what would make their rows unequal."""
        target, slots = self._slots.target, [sequence.slot for sequence in sequences]
        if not target.most_again:
            return
        again = [target.n_again(slot.seq) for slot in slots]
        settled: list[Slot] = []
        n_rows = len(again) * (1 + max(again))
        if n_rows > self._slots.free_cells + sum(again) or (plain and len(set(again)) > 1):
            settled = slots
        elif len(slots) > 1 and any(again):  # one alone decodes them again with a plain step
            most = self._most_again(len(slots))
            settled = [slot for slot, n in zip(slots, again, strict=True) if n > most]
        self._slots.settle(settled)
        if self._controller:
            left = sum(target.n_again(slot.seq) for slot in slots)
            self._controller.again.done(sum(again) - left)
            self._controller.again.now = left

    def _most_again(self, n_seqs: int) -> float:
        """Rows of a sequence that are decoded again together with a draft, at most."""
        most: float = self._slots.target.most_again
        return min(most, self._controller.most_again(n_seqs)) if self._controller else most

    def n_steps_ahead(self, sequences: list[Sequence]) -> int:
        """How many plain steps to decode at once, without a delay that a reader would notice."""
        n = len(sequences)
        if not all(s.draws_alone for s in sequences):
            return 1
        if any(self._slots.target.n_again(s.slot.seq) for s in sequences):
            return 1
        left = [s.remaining for s in sequences if s.remaining is not None]
        by_time = int(_AHEAD_S / self._meter.step_s) + 1
        most = _MOST_AHEAD if n == self._meter.last_rows else TO_WARM_UP
        n_steps = min([*left, self._slots.free_cells // n, by_time, most])
        if self._controller and self._left_to_controller(sequences):
            # A copy may begin any time, and most do early in an answer or soon after another copy:
            # so it is missed for no longer than the text has repeated nothing.
            new = min([self._meter.n_same, *(len(s.tokens) for s in sequences)])
            n_steps = min(n_steps, self._controller.idle + 1, max(new, TO_WARM_UP))
        return max(n_steps, 1)

    def _limits(self, sequences: list[Sequence]) -> list[int]:
        """The most nodes that each sequence may verify: what can be emitted, and has room."""
        target = self._slots.target
        again = sum(target.n_again(s.slot.seq) for s in sequences) if target.most_again else 0
        if again and len(sequences) == 1 and again > self._most_again(1):
            return [0]
        room = min(self._slots.free_cells, target.n_batch - again)
        free = room - len(sequences)  # the anchors
        limits = []
        for sequence in sequences:
            most = max(min(self.most_nodes(sequence), free), 0)
            limits.append(sequence.shape.limit(most, sequence.remaining))
            free -= limits[-1]
        # What is left is for copies, shared out evenly.
        widest = target.max_width - 1
        for i, sequence in enumerate(sequences):
            if sequence.copier and sequence.policy and limits[i] < widest:
                most = min(widest, limits[i] + max(free, 0) // (len(sequences) - i))
                wider = sequence.shape.limit(most, sequence.remaining)
                free -= wider - limits[i]
                limits[i] = wider
        return limits

    def _notice_lost(self, sequences: list[Sequence]) -> None:
        """A drafter that has failed may have lost some texts."""
        if self._slots.drafter is None:
            return
        for sequence in sequences:
            if sequence.wants_features and not self._slots.can_draft(sequence.slot):
                sequence.behind = True

    def _n_drafts(
        self, sequences: list[Sequence], limits: list[int], left: list[tuple[int, Policy]]
    ) -> list[int]:
        """How many tokens to draft for each sequence. `left` are those left to the controller."""
        n_drafts = [0] * len(sequences)
        drafter = self._slots.drafter
        for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            if drafter and limit and not sequence.behind and sequence.request.draft_width != "auto":
                n_drafts[i] = min(self.most_nodes(sequence), drafter.block_size - 1)
        if self._controller and left:
            chosen = self._controller.n_drafts(
                [policy for _, policy in left],
                [limits[i] for i, _ in left],
                len(sequences) - len(left),
            )
            for (i, _), n in zip(left, chosen, strict=True):
                n_drafts[i] = n
        return n_drafts

    def _copies(
        self,
        sequences: list[Sequence],
        limits: list[int],
        n_drafts: list[int],
        left: list[tuple[int, Policy]],
    ) -> list[list[Copy]]:
        """What each sequence's text offers. Where nobody drafts, only what may pay."""
        least = None
        if self._controller and left and not any(n_drafts) and not self._grows(sequences):
            least = self._controller.least_copied(len(left))
        found = [
            self._finds(sequence, limit, least if sequence.policy else None)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        if not any(found):
            return [[] for _ in sequences]
        return [self._offers(sequence) for sequence in sequences]

    def _grows(self, sequences: list[Sequence]) -> bool:
        """Whether copies alone may become a tree, which brings more than the best of them."""
        return self._slots.drafter is None and any(s.shape.n_leaves > 1 for s in sequences)

    def _copier(self, sequence: Sequence) -> Copier | None:
        """What finds copies for a sequence now; None while a failed drafter is put aside."""
        return None if sequence.behind or self._slots.lacks_drafter else sequence.copier

    def _finds(self, sequence: Sequence, limit: int, least: NDArray[np.float64] | None) -> bool:
        """Whether a sequence's text offers what is worth a look; see `Copier.finds`."""
        copier, remaining = self._copier(sequence), sequence.remaining
        if copier is None:
            return False
        n = limit if remaining is None else min(limit, remaining - 1)
        return copier.finds(sequence.request.prompt, sequence.tokens, n, least)

    def _offers(self, sequence: Sequence) -> list[Copy]:
        """What was found, as far as it may be emitted."""
        copier = self._copier(sequence)
        if copier is None:
            return []
        try:
            copies = copier.offers()
            cut = (copy.clip(sequence.sampler.n_valid(copy.tokens)) for copy in copies)
            return [copy for copy in cut if len(copy)]
        except GrammarError:
            return []  # if the answer itself cannot go on, its draw raises

    def _chances(
        self, sequences: list[Sequence], drafts: list[Draft], choice: Choice
    ) -> list[list[float]]:
        """For each sequence, the falling chances of its drafter's nodes."""
        chances: list[list[float]] = [[] for _ in sequences]
        if not any(drafts):
            return chances
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if draft and sequence.policy is None and choice.copies[i]:
                chances[i] = path_chances(draft)
        if self._controller and (left := self._left_to_controller(sequences)):
            found = self._controller.chances(
                [policy for _, policy in left],
                [drafts[i] for i, _ in left],
                [choice.limits[i] for i, _ in left],
            )
            for (i, _), curve in zip(left, found, strict=True):
                chances[i] = curve
        return chances

    def _joined(
        self,
        sequence: Sequence,
        own: Draft,
        chances: list[float],
        copies: list[Copy],
        limit: int,
    ) -> tuple[Draft, list[float]]:
        """What a drafter and the text propose together, and the falling chances of its nodes."""
        copier, shape = sequence.copier, sequence.shape
        if not own and (self._slots.drafter is not None or shape.n_leaves == 1):
            return copy_alone(copies)
        if own and copier:
            copies = heard(own, copies, copier.chances)
            copier.heard(copies)
        n_nodes = min(limit, shape.n_nodes) if shape.n_leaves > 1 else limit
        return joined(own, chances, copies, n_nodes=n_nodes, n_leaves=shape.n_leaves)

    def _left_to_controller(self, sequences: list[Sequence]) -> list[tuple[int, Policy]]:
        """The places of the sequences of width "auto", and their policies; none while a drafter
        that has failed is put aside."""
        if self._slots.lacks_drafter:
            return []
        return [(i, s.policy) for i, s in enumerate(sequences) if s.policy and not s.behind]
