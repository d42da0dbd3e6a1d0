"""A round over N sequences: choose, inject, draft, join, verify, accept.

The method is DFlash (Chen, Liang, Liu 2026, arXiv 2602.06036). A drafter proposes a block of tokens
after each sequence's anchor; where the text repeats itself, copies join that draft or replace it.
The target decodes anchors and drafts in one batch. The part of each draft that equals the target's
own tokens is accepted, and one more token of the target is the next anchor. The features of the
accepted rows are injected into the drafter with its next draft.
"""

from itertools import groupby

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.shape import allowed
from dflash_local.engine.accept import accept
from dflash_local.engine.choice import NO_DRAFT, Choice
from dflash_local.engine.meter import Lap, Meter
from dflash_local.engine.plain_steps import PlainSteps
from dflash_local.engine.prefix_cache import PrefixCache
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots
from dflash_local.engine.widths import Widths
from dflash_local.errors import BackendError, GrammarError
from dflash_local.target_model.batch import Batch, Part

MOST_WITH_A_DRAFT = 16
"""The most rows that are injected together with a draft. More rows are injected before it: the
clock of the draft stage is for drafts, not for a long injection."""


class Round:
    """Runs rounds of sequences whose prompt is decoded."""

    def __init__(self, slots: Slots, cache: PrefixCache, meter: Meter) -> None:
        """`cache` makes room in the slots; the controller is that of `meter`."""
        self._slots = slots
        self._cache = cache
        self._target = slots.target
        self._meter = meter
        self._widths = Widths(slots, meter.controller)
        self._plain = PlainSteps(slots, meter)

    def run(self, sequences: list[Sequence]) -> None:
        """One round of these sequences, or several plain steps at once.

        Raises as `Target.decode`, and InputError for a proposal of the wrong shape. A fault of a
        single sequence becomes its `error`; a drafter that fails is put aside.
        """
        for together in self._passes(self._with_cells(sequences)):
            self._run(together)

    def _passes(self, sequences: list[Sequence]) -> list[list[Sequence]]:
        """These sequences, in groups that llama.cpp takes in one pass: where they have cells of
        their own, their numbers must follow one another."""
        if not self._target.options.has_streams:
            return [sequences] if sequences else []
        in_order = enumerate(sorted(sequences, key=lambda s: s.slot.seq))
        groups = groupby(in_order, key=lambda each: each[1].slot.seq - each[0])
        return [[sequence for _, sequence in group] for _, group in groups]

    def _run(self, sequences: list[Sequence]) -> None:
        with self._meter.lap(sequences) as lap:
            choices = self._widths.choose(sequences)
            self._inject(choices, lap)
            self._draft(choices, lap)
            self._widths.join(choices)
            # A round that asked the drafter is never a plain one, even if all of it was cut away:
            # its time would spoil that of a plain step.
            if not any(choice.n_draft or choice.draft for choice in choices):
                self._plain.run(sequences, lap)
                return
            batch = self._verify(choices, lap)
            for choice, part in zip(choices, batch.parts, strict=True):
                self._accept(choice.sequence, choice.draft, part, lap)

    def emit_first(self, sequence: Sequence, output_row: int) -> None:
        """Emit the token after the last row of a prompt."""
        with sequence.isolated_errors(self._slots):
            token = sequence.draw(self._target, output_row)
            sequence.emit(token, ends_text=self._target.vocabulary.ends_text(token))
            sequence.stats.emitted += 1

    def _with_cells(self, sequences: list[Sequence]) -> list[Sequence]:
        """Make room in the caches, and return the sequences whose anchor has a cell. The others
        end here, unless their text may be shifted: the context is full.

        Room is made for the widest drafts, not only for the anchors. Otherwise idle slots would
        keep rounds narrow.
        """
        self._cache.make_room(sum(1 + s.most_nodes for s in sequences))
        room = self._slots.free_cells
        fitting: list[Sequence] = []
        for sequence in sequences:
            if len(fitting) < room and self._slots.n_left(sequence.slot) > 0:
                fitting.append(sequence)
            elif sequence.shift(self._target.n_ctx):
                # What is left is decoded again, like a prompt.
                self._slots.inject(sequence.slot)
                for_drafts = sequence.wants_features
                self._slots.roll_back(sequence.slot, sequence.n_kept, for_drafts=for_drafts)
            else:
                sequence.finish_reason = "length"
        return fitting

    def _inject(self, choices: list[Choice], lap: Lap) -> None:
        """Inject features that a prompt, plain decoding or copies alone left pending."""
        for choice in choices:
            slot = choice.sequence.slot
            if choice.n_draft and len(slot.pending) > MOST_WITH_A_DRAFT:
                with lap.injecting(len(slot.pending)):
                    self._slots.inject(slot)

    def _draft(self, choices: list[Choice], lap: Lap) -> None:
        """The drafter's part of each draft, as far as it can be verified; none when it fails."""
        drafting = [choice for choice in choices if choice.n_draft]
        lap.drafting([choice.sequence for choice in drafting])
        drafter = self._slots.drafter
        if drafter is None or not drafting:
            self._meter.tell()
            return
        requests = [
            DraftRequest(s.slot.seq, s.anchor, self._slots.take_features(s.slot), n, s.slot.cached)
            for s, n in ((choice.sequence, choice.n_draft) for choice in drafting)
        ]
        try:
            drafter.begin(requests)
        except Exception as error:
            self._slots.put_aside(error)
            return
        # Host work while the device drafts; a failure is not the drafter's.
        self._meter.tell()
        self._target.tidy()
        try:
            proposals = drafter.read()
        except Exception as error:
            self._slots.put_aside(error)
            return
        for choice, proposal in zip(drafting, proposals, strict=True):
            choice.draft = self._cut(choice.sequence, proposal, choice.limit)

    def _cut(self, sequence: Sequence, proposal: Draft, limit: int) -> Draft:
        """The part of a proposal that can be verified: it has room, and the grammar allows it."""
        limit = min(limit, sequence.most_nodes)  # only copies may have more
        draft = sequence.shape.cut(
            proposal, self._target.n_vocab, limit, sequence.remaining, sequence.rate
        )
        if not sequence.sampler.is_bound:
            return draft
        try:
            return allowed(draft, sequence.sampler.n_valid)
        except GrammarError:
            return NO_DRAFT  # if the answer itself cannot go on, its draw raises

    def _verify(self, choices: list[Choice], lap: Lap) -> Batch:
        """One pass of the target over the anchor and the draft of every sequence."""
        lap.verifying()
        batch = Batch()
        for choice in choices:
            s, slot = choice.sequence, choice.sequence.slot
            begin = len(slot.cached)
            s.shape.place(batch, slot.seq, begin, s.anchor, choice.draft, choice.n_rows)
        self._slots.decode(batch)
        lap.accepting(len(batch), batch.shape)
        return batch

    def _accept(self, sequence: Sequence, draft: Draft, part: Part, lap: Lap) -> None:
        """Emit the target's tokens along the draft, and keep the rows of the accepted ones."""
        # Every row of the batch has logits: `first + row` names them, and the row's features.
        anchor, first = sequence.anchor, part.first_row
        ends_text = self._target.vocabulary.ends_text
        with sequence.isolated_errors(self._slots):
            with lap.sampling(sequence):
                verdict = accept(
                    draft,
                    lambda row: sequence.draw(self._target, first + row),
                    lambda token: sequence.emit(token, ends_text=ends_text(token)),
                )
            path = verdict.path
            if not self._target.keep(part, path):
                raise BackendError("llama.cpp cannot take back the rejected rows of a draft")
            self._slots.commit(
                sequence.slot,
                [anchor, *(draft.tokens[row - 1] for row in path[1:])],
                (first + row for row in path),
                features=sequence.wants_features,
            )
            copied = [draft.copied[row - 1] for row in path[1:]]
            sequence.mark_drafted(copied)
            self._meter.count(sequence, draft, verdict, sum(copied))
