"""How wide a round is: what requests ask for, what fits, and what pays off."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.draft.draft import Draft
from dflash_local.engine.meter import TO_WARM_UP, Meter
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots
from dflash_local.pays.controller import Controller
from dflash_local.pays.policy import Policy

_AHEAD_S, _MOST_AHEAD = 0.004, 16
"""The most plain steps in one call, in seconds and in number. More would delay tokens on their way
out, and a cancel. With one at a time, Python costs a small model a tenth of its speed."""


@dataclass(frozen=True)
class Choice:
    """For each sequence of a round: how many tokens to draft (0 for a plain step), and how many
    drafted nodes may be verified."""

    n_drafts: list[int]
    limits: list[int]

    @property
    def n_drafting(self) -> int:
        return sum(map(bool, self.n_drafts))


class Widths:
    """Chooses widths. It asks the controller for the sequences of width "auto"."""

    def __init__(self, slots: Slots, meter: Meter, controller: Controller | None) -> None:
        self._slots = slots
        self._meter = meter
        self._controller = controller

    def most_nodes(self, sequence: Sequence) -> int:
        """The most nodes that a round may verify for a sequence."""
        width = sequence.request.draft_width
        return sequence.shape.n_nodes if width == "auto" else max(width - 1, 0)

    def choose(self, sequences: list[Sequence]) -> Choice:
        """Choose before drafting. A fixed width is not reduced: that would need another graph."""
        limits = self._limits(sequences)
        n_drafts = [0] * len(sequences)
        drafter = self._slots.drafter
        if drafter is None:
            return Choice(n_drafts, limits)
        for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            if sequence.wants_features and not self._slots.can_draft(sequence.slot):
                sequence.behind = True
            elif limit and sequence.request.draft_width != "auto":
                n_drafts[i] = min(self.most_nodes(sequence), drafter.block_size - 1)
        if self._controller and (left := _left_to_controller(sequences)):
            policies = [policy for _, policy in left]
            chosen = self._controller.n_drafts(
                policies, [limits[i] for i, _ in left], len(sequences) - len(left)
            )
            for (i, _), n in zip(left, chosen, strict=True):
                n_drafts[i] = n
        return Choice(n_drafts, limits)

    def clip(self, sequences: list[Sequence], drafts: list[Draft], choice: Choice) -> list[Draft]:
        """Cut each draft, after drafting, where verifying more of it would not pay off."""
        whole = list(drafts)
        if self._controller and (left := _left_to_controller(sequences)):
            widths = self._controller.widths(
                [policy for _, policy in left],
                [drafts[i] for i, _ in left],
                [choice.limits[i] for i, _ in left],
            )
            for (i, _), width in zip(left, widths, strict=True):
                drafts[i] = drafts[i].clip(width - 1)
        if self._slots.target.needs_equal_rows:
            # All get as many rows as the widest. Some have more drafts to fill theirs.
            n_rows = self.n_rows(drafts)
            return [draft.clip(n_rows - 1) for draft in whole]
        return drafts

    def n_rows(self, drafts: list[Draft]) -> int:
        """The least number of rows that each sequence gets in a pass over these drafts."""
        target = self._slots.target
        if not target.needs_equal_rows:
            return 1
        room = min(self._slots.free_cells, target.n_batch)
        return min(1 + max(map(len, drafts)), room // len(drafts))

    def n_steps_ahead(self, sequences: list[Sequence]) -> int:
        """How many plain steps to decode at once, without a delay that a reader would notice."""
        n = len(sequences)
        left = [s.remaining for s in sequences if s.remaining is not None]
        by_time = int(_AHEAD_S / self._meter.step_s) + 1
        most = _MOST_AHEAD if n == self._meter.last_rows else TO_WARM_UP
        n_steps = min([*left, self._slots.free_cells // n, by_time, most])
        if self._controller and self._slots.drafter and _left_to_controller(sequences):
            n_steps = min(n_steps, self._controller.idle + 1)
        return max(n_steps, 1)

    def _limits(self, sequences: list[Sequence]) -> list[int]:
        """The most nodes that each sequence may verify: what can be emitted, and has room."""
        room = min(self._slots.free_cells, self._slots.target.n_batch)
        free = room - len(sequences)  # the anchors
        limits = []
        for sequence in sequences:
            most = max(min(self.most_nodes(sequence), free), 0)
            limits.append(sequence.shape.limit(most, sequence.remaining))
            free -= limits[-1]
        return limits


def _left_to_controller(sequences: list[Sequence]) -> list[tuple[int, Policy]]:
    """The places of the sequences of width "auto", and their policies."""
    return [(i, s.policy) for i, s in enumerate(sequences) if s.policy and not s.behind]
