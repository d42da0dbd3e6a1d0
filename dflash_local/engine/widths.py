"""How wide a round is: what requests ask for, what fits, and what pays off.

A width, `Choice.n_rows` and the controller's `widths` and `rows` count rows of the target, with the
anchor's. Limits and drafts count nodes, without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

NO_DRAFT = Draft.chain([])
_AHEAD_S, _MOST_AHEAD = 0.016, 16
"""The most plain steps in one call, in seconds, a screen's frame, and in number. More would delay
tokens on their way out, and a cancel. With one at a time, Python costs a small model a tenth of its
speed."""


@dataclass
class Choice:
    """What one sequence does in a round."""

    sequence: Sequence
    limit: int
    """How many nodes may be verified. A text's copies may be longer than the drafter's block."""
    n_draft: int = 0
    """How many tokens to ask the drafter for; 0 for none."""
    copies: list[Copy] = field(default_factory=list)
    """What its text offers to copy."""
    draft: Draft = NO_DRAFT
    """At first what the drafter proposes, then what is verified."""
    chances: list[float] = field(default_factory=list)
    """The falling chances of the draft's nodes, where copies join it."""
    n_rows: int = 1
    """The rows that it gets in the target's pass: its draft is cut to them. Where all sequences of
    a pass need equally many, a shorter draft leaves some of them empty."""


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

    def choose(self, sequences: list[Sequence]) -> list[Choice]:
        """Choose before drafting. A fixed width is not reduced: that would need another graph."""
        self._notice_lost(sequences)
        choices = self._limited(sequences)
        managed, policies = self._managed(choices)
        self._choose_drafts(choices, managed, policies)
        self._find_copies(choices, len(managed))
        if self._controller and any(c.n_draft for c in choices) and any(c.copies for c in choices):
            n_drafts = self._controller.without_sure(
                policies, [c.n_draft for c in managed], [copy_alone(c.copies)[1] for c in managed]
            )
            for choice, n in zip(managed, n_drafts, strict=True):
                choice.n_draft = n
        return choices

    def _notice_lost(self, sequences: list[Sequence]) -> None:
        """A drafter that has failed may have lost some texts."""
        if self._slots.drafter is None:
            return
        for sequence in sequences:
            if sequence.wants_features and not self._slots.can_draft(sequence.slot):
                sequence.behind = True

    def _limited(self, sequences: list[Sequence]) -> list[Choice]:
        """The most nodes that each sequence may verify: what can be emitted, and has room."""
        target = self._slots.target
        again = sum(target.n_again(s.slot.seq) for s in sequences) if target.most_again else 0
        if again and len(sequences) == 1 and again > self._most_again(1):
            return [Choice(sequences[0], 0)]
        room = min(self._slots.free_cells, target.n_batch - again)
        free = room - len(sequences)  # the anchors
        choices = []
        for sequence in sequences:
            most = max(min(self.most_nodes(sequence), free), 0)
            choices.append(Choice(sequence, sequence.shape.limit(most, sequence.remaining)))
            free -= choices[-1].limit
        # What is left is for copies, shared out evenly.
        widest = target.max_width - 1
        for i, choice in enumerate(choices):
            sequence = choice.sequence
            if sequence.copier and sequence.policy and choice.limit < widest:
                most = min(widest, choice.limit + max(free, 0) // (len(choices) - i))
                wider = sequence.shape.limit(most, sequence.remaining)
                free -= wider - choice.limit
                choice.limit = wider
        return choices

    def _choose_drafts(
        self, choices: list[Choice], managed: list[Choice], policies: list[Policy]
    ) -> None:
        """How many tokens to draft for each sequence."""
        drafter = self._slots.drafter
        for choice in choices:
            sequence = choice.sequence
            is_fixed = sequence.request.draft_width != "auto"
            if drafter and choice.limit and is_fixed and not sequence.behind:
                choice.n_draft = min(self.most_nodes(sequence), drafter.block_size - 1)
        if self._controller and managed:
            n_others = len(choices) - len(managed)
            n_drafts = self._controller.n_drafts(policies, [c.limit for c in managed], n_others)
            for choice, n in zip(managed, n_drafts, strict=True):
                choice.n_draft = n

    def _find_copies(self, choices: list[Choice], n_managed: int) -> None:
        """What each sequence's text offers. Where nobody drafts, only what may pay."""
        least = None
        if self._controller and n_managed and not any(c.n_draft for c in choices):
            # Copies alone may become a tree, which brings more than the best of them.
            grow = self._slots.drafter is None and any(
                c.sequence.shape.n_leaves > 1 for c in choices
            )
            least = None if grow else self._controller.least_copied(n_managed)
        found = False
        for choice in choices:
            sequence, n, copier = choice.sequence, choice.limit, self._copier(choice.sequence)
            if copier is None:
                continue
            if sequence.remaining is not None:
                n = min(n, sequence.remaining - 1)
            prompt, enough = sequence.request.prompt, least if sequence.policy else None
            found |= copier.finds(prompt, sequence.tokens, n, enough)
        if found:
            for choice in choices:
                choice.copies = self._offers(choice.sequence)

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

    def _copier(self, sequence: Sequence) -> Copier | None:
        """What finds copies for a sequence now; None while a failed drafter is put aside."""
        return None if sequence.behind or self._slots.lacks_drafter else sequence.copier

    def join(self, choices: list[Choice]) -> None:
        """Join each draft with its copies, and cut it where verifying more would not pay off."""
        drafted, copied = any(c.n_draft for c in choices), any(c.copies for c in choices)
        if not drafted and not copied:
            return
        managed, policies = self._managed(choices)
        if copied:
            self._join_copies(choices, managed, policies)
        for choice in choices:
            choice.n_rows = 1 + len(choice.draft)
        if self._controller and managed:
            if copied:  # their chances are joined already
                rows = self._controller.rows([c.chances for c in managed], drafted=drafted)
            else:
                rows = self._controller.widths(
                    policies, [c.draft for c in managed], [c.limit for c in managed]
                )
            for choice, n in zip(managed, rows, strict=True):
                choice.n_rows = min(n, choice.n_rows)
        if self._slots.target.needs_equal_rows:
            self._equal_rows(choices)
        for choice in choices:
            choice.draft = choice.draft.clip(choice.n_rows - 1)

    def _join_copies(
        self, choices: list[Choice], managed: list[Choice], policies: list[Policy]
    ) -> None:
        """Make one draft of what drafter and text propose, with the chances of its nodes."""
        for choice in choices:
            if choice.copies and choice.sequence.policy is None:
                choice.chances = path_chances(choice.draft)
        if self._controller and managed:
            found = self._controller.chances(
                policies, [c.draft for c in managed], [c.limit for c in managed]
            )
            for choice, chances in zip(managed, found, strict=True):
                choice.chances = chances
        for choice in choices:
            if choice.copies:
                choice.draft, choice.chances = self._joined(choice)

    def _joined(self, choice: Choice) -> tuple[Draft, list[float]]:
        """What a drafter and the text propose together, and the falling chances of its nodes."""
        own, copies, limit = choice.draft, choice.copies, choice.limit
        copier, shape = choice.sequence.copier, choice.sequence.shape
        if not own and (self._slots.drafter is not None or shape.n_leaves == 1):
            return copy_alone(copies)  # a chain, as `Controller.rows` counts it
        if own and copier:
            copies = heard(own, copies, copier.chances)
            copier.heard(copies)
        n_nodes = min(limit, shape.n_nodes) if shape.n_leaves > 1 else limit
        return joined(own, choice.chances, copies, n_nodes=n_nodes, n_leaves=shape.n_leaves)

    def _equal_rows(self, choices: list[Choice]) -> None:
        """Give all as many rows as the widest, with those that are decoded again. Some have more
        drafts to fill theirs."""
        target, n = self._slots.target, len(choices)
        again = [target.n_again(choice.sequence.slot.seq) for choice in choices]
        wanted = max(n_again + c.n_rows for n_again, c in zip(again, choices, strict=True))
        room = min((self._slots.free_cells + sum(again)) // n, target.n_batch // n)
        for n_again, choice in zip(again, choices, strict=True):
            choice.n_rows = min(wanted, room) - n_again

    def _managed(self, choices: list[Choice]) -> tuple[list[Choice], list[Policy]]:
        """The choices that the controller makes, with the policies of their sequences."""
        managed = [(c, policy) for c in choices if (policy := self._policy(c.sequence))]
        return [choice for choice, _ in managed], [policy for _, policy in managed]

    def _policy(self, sequence: Sequence) -> Policy | None:
        """That of a sequence of width "auto"; None while a drafter that has failed is put aside."""
        return None if sequence.behind or self._slots.lacks_drafter else sequence.policy

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
        if self._controller and any(self._policy(s) for s in sequences):
            # A copy that begins within these steps is missed. Most begin early in an answer, or
            # soon after another one. So no more steps than the text has repeated nothing for.
            new = min([self._meter.n_same, *(len(s.tokens) for s in sequences)])
            n_steps = min(n_steps, self._controller.idle + 1, max(new, TO_WARM_UP))
        return max(n_steps, 1)

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
