"""The width of a round: asked for by requests, limited by the room, tuned by the controller.

A width, `Choice.n_rows` and the controller's `rows` count rows of the target, with the
anchor's. Limits and drafts count nodes, without it.
"""

from dflash_local.controller.controller import Controller, Policy
from dflash_local.engine.choice import Choice
from dflash_local.engine.copying import Copying
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots
from dflash_local.fit.options import MAX_OUTPUT_ROWS


class Widths:
    """Chooses widths. It asks the controller for the sequences of width "auto"."""

    def __init__(self, slots: Slots, controller: Controller | None) -> None:
        self._slots = slots
        self._controller = controller
        self._copying = Copying(slots, controller)
        target = slots.target
        # In wider passes a GPU runs llama.cpp's kernels, by which rows round beside others.
        most = MAX_OUTPUT_ROWS if target.options.has_streams else target.n_batch
        self._most_rows = min(target.n_batch, most)

    # Before the draft

    def choose(self, sequences: list[Sequence]) -> list[Choice]:
        """Choose the number of tokens to draft for each sequence, and find copies in its text. Of
        a fixed width the draft is never shortened: that would need another graph."""
        self._notice_lost(sequences)
        choices = self._limited(sequences)
        managed, policies = self._managed(choices)
        self._choose_drafts(choices, managed, policies)
        self._copying.find(choices, managed, policies)
        return choices

    def _notice_lost(self, sequences: list[Sequence]) -> None:
        """A drafter that has failed may have lost some texts."""
        if self._slots.drafter is None:
            return
        for sequence in sequences:
            if sequence.wants_features and not self._slots.can_draft(sequence.slot):
                sequence.drafter_lost_text = True

    def _limited(self, sequences: list[Sequence]) -> list[Choice]:
        """The most nodes that each sequence may verify: those that can be emitted, and have
        room."""
        room = min(self._slots.free_cells, self._most_rows)
        free = room - len(sequences)  # the anchors
        choices = []
        for sequence in sequences:
            most = max(min(sequence.most_nodes, free), 0)
            choices.append(Choice(sequence, sequence.shape.limit(most, sequence.remaining)))
            free -= choices[-1].limit
        self._copying.widen(choices, free)
        for choice in choices:
            choice.limit = min(choice.limit, self._slots.n_left(choice.sequence.slot) - 1)
        return choices

    def _choose_drafts(
        self, choices: list[Choice], managed: list[Choice], policies: list[Policy]
    ) -> None:
        """Choose the number of tokens to draft for each sequence."""
        drafter = self._slots.drafter
        for choice in choices:
            sequence = choice.sequence
            is_fixed = sequence.request.draft_width != "auto"
            if drafter and choice.limit and is_fixed and not sequence.drafter_lost_text:
                choice.n_draft = min(sequence.most_nodes, drafter.block_size - 1)
        if self._controller and managed:
            n_others = len(choices) - len(managed)
            n_drafts = self._controller.n_drafts(policies, [c.limit for c in managed], n_others)
            for choice, n in zip(managed, n_drafts, strict=True):
                choice.n_draft = n

    # After the draft

    def join(self, choices: list[Choice]) -> None:
        """Join each draft with its copies, and cut it where verifying more would not pay off."""
        drafted, copied = any(c.n_draft for c in choices), any(c.copies for c in choices)
        if not drafted and not copied:
            return
        managed, policies = self._managed(choices)
        if self._controller and managed:
            found = self._controller.judge(policies, [c.draft for c in managed])
            for choice, chances in zip(managed, found, strict=True):
                choice.chances = chances
        if copied:
            self._copying.join(choices)
        for choice in choices:
            choice.n_rows = 1 + len(choice.draft)
        if self._controller and managed:
            rows = self._controller.rows([c.chances for c in managed], drafted=drafted)
            for choice, n in zip(managed, rows, strict=True):
                choice.n_rows = min(n, choice.n_rows)
        self._make_equal(choices)
        for choice in choices:
            choice.draft = choice.draft.clip(choice.n_rows - 1)

    def _make_equal(self, choices: list[Choice]) -> None:
        """Give all as many rows as the widest, where the target needs it. Some have more
        drafts to fill theirs."""
        target = self._slots.target
        if target.needs_equal_rows:
            room = min(self._slots.free_cells, self._most_rows) // len(choices)
            left = min(self._slots.n_left(choice.sequence.slot) for choice in choices)
            n_rows = min(max(choice.n_rows for choice in choices), room, left)
            for choice in choices:
                choice.n_rows = n_rows

    def _managed(self, choices: list[Choice]) -> tuple[list[Choice], list[Policy]]:
        """The choices that the controller makes, with the policies of their sequences: those of
        width "auto", unless the drafter has failed."""
        managed = [
            (choice, choice.sequence.policy)
            for choice in choices
            if choice.sequence.policy and not choice.sequence.without_drafter(self._slots)
        ]
        return [choice for choice, _ in managed], [policy for _, policy in managed]
