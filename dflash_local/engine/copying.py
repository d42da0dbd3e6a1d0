"""The part of a round that copies from its sequences' texts, beside drafts or in their place."""

import numpy as np
from numpy.typing import NDArray

from dflash_local.controller.controller import Controller, Policy
from dflash_local.copies.copier import Copier, Copy
from dflash_local.copies.join import copy_alone, joined, judged_by_drafter
from dflash_local.draft.draft import Draft
from dflash_local.engine.choice import Choice
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots
from dflash_local.errors import GrammarError


class Copying:
    """Finds copies before the draft, and joins them with it."""

    def __init__(self, slots: Slots, controller: Controller | None) -> None:
        self._slots = slots
        self._controller = controller

    def widen(self, choices: list[Choice], n_free: int) -> None:
        """Share out rows that drafts leave free: copies may be longer than a drafter's block."""
        widest = self._slots.target.max_width - 1
        for i, choice in enumerate(choices):
            sequence = choice.sequence
            if sequence.copier and sequence.policy and choice.limit < widest:
                most = min(widest, choice.limit + max(n_free, 0) // (len(choices) - i))
                if sequence.remaining is not None:
                    most = min(most, max(sequence.remaining - 1, choice.limit))
                wider = sequence.shape.limit(most, sequence.remaining)
                n_free -= wider - choice.limit
                choice.limit = wider

    def find(self, choices: list[Choice], managed: list[Choice], policies: list[Policy]) -> None:
        """Find copies in each text; if nobody drafts, only those that may pay. A sequence whose
        copies are sure does without a draft."""
        drafts = any(choice.n_draft for choice in choices)
        least = self._least(choices, len(managed)) if managed and not drafts else None
        found = False
        for choice in choices:
            sequence, n, copier = choice.sequence, choice.limit, self._copier(choice.sequence)
            if copier is None:
                continue
            if sequence.remaining is not None:
                n = min(n, sequence.remaining - 1)
            prompt, enough = sequence.request.spoken, least if sequence.policy else None
            found |= copier.finds(prompt, sequence.tokens, n, enough)
        if found:
            for choice in choices:
                choice.copies = self._offers(choice.sequence)
        if self._controller and drafts and any(choice.copies for choice in choices):
            n_drafts = self._controller.skip_drafter_for_sure_copies(
                policies, [c.n_draft for c in managed], [copy_alone(c.copies)[1] for c in managed]
            )
            for choice, n in zip(managed, n_drafts, strict=True):
                choice.n_draft = n

    def _least(self, choices: list[Choice], n_managed: int) -> NDArray[np.float64] | None:
        """The least to expect of copies alone; see `Controller.least_copied`."""
        is_tree = any(choice.sequence.shape.n_leaves > 1 for choice in choices)
        if self._controller is None or (self._slots.drafter is None and is_tree):
            return None  # several may become a tree, which brings more than the best of them
        return self._controller.least_copied(n_managed)

    def _offers(self, sequence: Sequence) -> list[Copy]:
        """The copies that were found, as far as they may be emitted."""
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
        """The finder of copies for a sequence now. None while a failed drafter is put aside: the
        controller, which decides on copies, counts on the drafter."""
        return None if sequence.without_drafter(self._slots) else sequence.copier

    def join(self, choices: list[Choice]) -> None:
        """Join the proposals of drafter and text in one draft, with the chances of its nodes."""
        for choice in choices:
            if choice.copies:
                if choice.sequence.policy is None:
                    choice.chances = choice.draft.chances
                choice.draft, choice.chances = self._joined(choice)

    def _joined(self, choice: Choice) -> tuple[Draft, list[float]]:
        own, copies, limit = choice.draft, choice.copies, choice.limit
        copier, shape = choice.sequence.copier, choice.sequence.shape
        if not own and (self._slots.drafter is not None or shape.n_leaves == 1):
            # A chain is asked for, or the controller prices copies beside a drafter as chains.
            return copy_alone(copies)
        if own and copier:
            copies = judged_by_drafter(own, copies, copier.chances)
            copier.take_kinds(copies)
        n_nodes = min(limit, choice.sequence.most_nodes) if shape.n_leaves > 1 else limit
        return joined(own, choice.chances, copies, n_nodes=n_nodes, n_leaves=shape.n_leaves)
