"""The rounds over N sequences: draft, verify, accept, inject. Knows token ids only."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np

from dflash_local.draft import ANCHOR, Draft
from dflash_local.drafter import Drafter, DraftRequest
from dflash_local.errors import ContextFullError, InputError
from dflash_local.features import StoredFeatures
from dflash_local.sampling import Sampler, not_finite
from dflash_local.sequence import Request, Sequence, Slot
from dflash_local.stats import Stats
from dflash_local.target import Target
from dflash_local.verify import Verdict, verify

_NO_DRAFT = Draft.chain([])

Verifier: TypeAlias = Callable[[Draft, Callable[[int], int], Callable[[int], bool]], Verdict]


class Engine:
    """Slots of a target and, if there is one, a drafter. One thread owns it."""

    def __init__(self, target: Target, drafter: Drafter | None, n_seq: int = 1) -> None:
        self.target = target
        self.drafter = drafter
        self.slots = [Slot(seq) for seq in range(n_seq)]
        self._clock = 0
        self._n_decoded = 0
        self.verifier: Verifier = verify
        """How drafts are checked; a benchmark may put another in its place."""

    @property
    def max_width(self) -> int:
        """The widest verify pass: the drafter's block, 0 without a drafter."""
        return self.drafter.block_size if self.drafter else 0

    def check(self, request: Request) -> None:
        """Raises InputError, ContextFullError for what cannot be begun."""
        n_vocab, n_ctx = self.target.n_vocab, self.target.n_ctx
        if not request.prompt:
            raise InputError("the prompt is empty; give at least one token")
        for token in request.prompt:
            if not 0 <= token < n_vocab:
                raise InputError(f"token id {token} of the prompt is not in 0 to {n_vocab - 1}")
        if len(request.prompt) >= n_ctx:
            raise ContextFullError(
                f"the prompt has {len(request.prompt)} tokens, the context holds {n_ctx} "
                "with at least one for the answer; shorten the prompt or load with a larger n_ctx"
            )
        if request.max_tokens is not None and not _is_count(request.max_tokens, 1):
            raise InputError(
                f"max_tokens is {request.max_tokens!r}; expected a whole number, 1 or more"
            )
        if not _is_count(request.draft_width, 0):
            raise InputError(
                f"draft_width is {request.draft_width!r}; expected a whole number, 0 or more"
            )
        if request.drafts and not self.drafter:
            raise InputError(
                f"draft_width is {request.draft_width}, but there is no drafter; "
                "load one with draft=, or set draft_width to 0"
            )
        if request.draft_width > max(self.max_width, 1):
            raise InputError(
                f"draft_width is {request.draft_width}; this drafter's block allows at most "
                f"{self.max_width}"
            )

    def begin(self, request: Request) -> Sequence:
        """Take the free slot that has most of the prompt in its caches, and keep what is common.

        Raises what `check` and `Sampler` raise, and InputError when no slot is free.
        """
        self.check(request)
        free = [slot for slot in self.slots if not slot.busy]
        if not free:
            raise InputError(f"all {len(self.slots)} slots are busy; wait for one to end")
        slot = max(free, key=lambda slot: (slot.common_prefix(request.prompt), -slot.last_use))
        sampler = Sampler(
            request.sampling,
            self.target.vocabulary.pointer,
            self.target.n_vocab,
            n_ctx=self.target.n_ctx,
        )
        sampler.accept_prompt(request.prompt)
        # The last row of the prompt is always decoded: its logits give the first token.
        n_common = min(slot.common_prefix(request.prompt), len(request.prompt) - 1)
        self._roll_back(slot, n_common, for_drafts=request.drafts)
        slot.busy = True
        stats = Stats(prompt_tokens=len(request.prompt), cached_tokens=len(slot.cached))
        return Sequence(request, slot, sampler, stats)

    def end(self, sequence: Sequence) -> None:
        """Give the slot back, its caches at the same token, if need be empty. Safe to call again.

        Raises what the drafter raises.
        """
        slot = sequence.slot
        if not slot.busy:
            return
        sequence.sampler.close()
        if sequence.finish_reason is None:
            sequence.finish_reason = "cancelled"
        slot.busy = False
        self._clock += 1
        slot.last_use = self._clock
        try:
            self._inject(slot)
        except BaseException:
            self._forget(slot)
            raise

    def step(self, sequences: List[Sequence]) -> None:
        """One chunk of each prompt that is not yet decoded, then one round of the others.

        Whatever is raised, these sequences are over and their caches empty.
        """
        try:
            for sequence in sequences:
                if sequence.cancelled.is_set() and sequence.finish_reason is None:
                    sequence.finish_reason = "cancelled"
                elif sequence.finish_reason is None and sequence.in_prompt:
                    self._prefill(sequence)
                    continue
            self._round([s for s in sequences if s.finish_reason is None and not s.in_prompt])
        except BaseException:
            for sequence in sequences:
                self._forget(sequence.slot)
                sequence.finish_reason = sequence.finish_reason or "cancelled"
            raise

    def run(self, sequences: List[Sequence]) -> None:
        """Step until all have finished, and give their slots back."""
        with ExitStack() as stack:
            for sequence in sequences:
                stack.callback(self.end, sequence)
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step(sequences)

    def forget_all(self) -> None:
        """Empty the caches of all free slots."""
        for slot in self.slots:
            if not slot.busy:
                self._forget(slot)

    # A prompt, chunk by chunk

    def _prefill(self, sequence: Sequence) -> None:
        start = time.perf_counter()
        slot, prompt = sequence.slot, sequence.request.prompt
        begin = len(slot.cached)
        chunk = prompt[begin : begin + self.target.n_batch]
        last = begin + len(chunk) == len(prompt)
        self._make_room(len(chunk))
        if self._free_cells() < len(chunk):  # other sequences have taken the rest
            sequence.finish_reason = "length"
            return
        self._pass(
            chunk,
            range(begin, begin + len(chunk)),
            [slot.seq] * len(chunk),
            [False] * (len(chunk) - 1) + [last],
        )
        slot.cached += chunk
        if sequence.request.drafts:
            first = self.target.first_stored
            slot.pending += range(first, first + len(chunk))
            self._inject(slot)
        stats = sequence.stats
        if last:
            token = self._draw(sequence, len(chunk) - 1, 0)
            sequence.emit(token, ends_text=self.target.vocabulary.ends_text(token))
            stats.emitted += 1
        stats.prompt_s += time.perf_counter() - start
        stats.ttft_s = stats.prompt_s

    # A round: draft, verify, accept

    def _round(self, sequences: List[Sequence]) -> None:
        sequences = self._with_room(sequences)
        if not sequences:
            return
        start = time.perf_counter()
        drafts = self._draft(sequences)
        drafted = time.perf_counter()
        first_rows = self._decode(sequences, drafts)
        verified = time.perf_counter()
        for sequence, draft, row in zip(sequences, drafts, first_rows, strict=True):
            sampling = time.perf_counter()
            verdict = self._match(sequence, draft, row)
            sequence.stats.sample_s += time.perf_counter() - sampling
            self._accept(sequence, draft, verdict, row)
        end = time.perf_counter()
        for sequence in sequences:
            sequence.stats.draft_s += drafted - start
            sequence.stats.verify_s += verified - drafted
            sequence.stats.decode_s += end - start

    def _draft(self, sequences: List[Sequence]) -> list[Draft]:
        """A draft per sequence, empty for those that decode plainly this time."""
        drafts = [_NO_DRAFT] * len(sequences)
        free = self._free_cells() - len(sequences)  # the anchors
        requests, places, limits = [], [], []
        for i, sequence in enumerate(sequences):
            # Not more than can be emitted, nor than the context has room for.
            limit = min(sequence.request.draft_width - 1, free)
            if sequence.remaining is not None:
                limit = min(limit, sequence.remaining - 1)
            if limit < 1:
                continue
            free -= limit
            slot = sequence.slot
            features = StoredFeatures(self.target, slot.pending)
            # Always the whole width: a graph of another size would be another graph.
            n_draft = sequence.request.draft_width - 1
            requests.append(DraftRequest(slot.seq, sequence.anchor, features, n_draft))
            places.append(i)
            limits.append(limit)
        if not requests or self.drafter is None:
            return drafts
        for i, limit, draft in zip(places, limits, self.drafter.draft(requests), strict=True):
            sequences[i].slot.pending = []
            drafts[i] = _checked(draft.valid_prefix(self.target.n_vocab).clip(limit))
        return drafts

    def _decode(self, sequences: List[Sequence], drafts: List[Draft]) -> list[int]:
        """One batch, [anchor, drafts] of every sequence; returns the row of each anchor."""
        tokens: list[int] = []
        positions: list[int] = []
        seq_ids: list[int] = []
        first_rows: list[int] = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            first_rows.append(len(tokens))
            n = 1 + len(draft)
            begin = len(sequence.slot.cached)
            tokens += [sequence.anchor, *draft.tokens]
            positions += range(begin, begin + n)
            seq_ids += [sequence.slot.seq] * n
        self._pass(tokens, positions, seq_ids, [True] * len(tokens))
        return first_rows

    def _match(self, sequence: Sequence, draft: Draft, first_row: int) -> Verdict:
        vocabulary = self.target.vocabulary
        return self.verifier(
            draft,
            lambda row: self._draw(sequence, first_row + row, first_row + row),
            lambda token: sequence.emit(token, ends_text=vocabulary.ends_text(token)),
        )

    def _accept(self, sequence: Sequence, draft: Draft, verdict: Verdict, first_row: int) -> None:
        """Keep the accepted rows of the caches; their hidden states are the next injection."""
        slot = sequence.slot
        n_emitted = len(verdict.tokens)
        anchor = (sequence.tokens[-n_emitted - 1],)
        slot.cached += anchor + tuple(draft.tokens[row - 1] for row in verdict.path[1:])
        if len(verdict.path) < 1 + len(draft):
            self.target.truncate(slot.seq, len(slot.cached))
        if sequence.request.drafts:
            first = self.target.first_stored + first_row
            slot.pending += [first + row for row in verdict.path]
        sequence.stats.record_round(drafted=len(draft), emitted=n_emitted)

    def _draw(self, sequence: Sequence, row: int, output_row: int) -> int:
        """The target's token after a row of the last batch, the `output_row`-th with logits."""
        sampler = sequence.sampler
        if sampler.takes_best and sequence.request.sampling.logprobs is None:
            token = self.target.best()[output_row]
            if token < 0:
                raise not_finite()
            return token
        logits = self.target.logits(row)
        token = sampler.sample(logits)
        if sequence.request.sampling.logprobs is not None:
            sequence.logprobs.append(sampler.logprobs(logits, token))
        return token

    # What the drafter has of the target's hidden states

    def _pass(
        self, tokens: List[int], positions: List[int], seq_ids: List[int], output: List[bool]
    ) -> None:
        """One batch through the target, whose store must not lose rows that nobody has injected."""
        n = len(tokens)
        lost = self._n_decoded + n - self.target.n_stored
        for slot in self.slots:
            if slot.pending and slot.pending[0] < lost:
                self._inject(slot)
        self.target.decode(tokens, positions, seq_ids, output)
        self._n_decoded = self.target.first_stored + n

    def _inject(self, slot: Slot) -> None:
        pending, slot.pending = slot.pending, []
        if pending and self.drafter:
            self.drafter.inject(slot.seq, StoredFeatures(self.target, pending))

    # Cells of the one cache that all slots share

    def _free_cells(self) -> int:
        return self.target.n_ctx - sum(len(slot.cached) for slot in self.slots)

    def _make_room(self, n: int) -> None:
        """Empty free slots, the least recently used first, until n cells are free."""
        idle = sorted((s for s in self.slots if not s.busy and s.cached), key=lambda s: s.last_use)
        for slot in idle:
            if self._free_cells() >= n:
                return
            self._forget(slot)

    def _with_room(self, sequences: List[Sequence]) -> list[Sequence]:
        """Those whose anchor fits the context; the rest have reached its end."""
        self._make_room(sum(max(1, sequence.request.draft_width) for sequence in sequences))
        room = self._free_cells()
        for sequence in sequences[max(room, 0) :]:
            sequence.finish_reason = "length"
        return list(sequences[: max(room, 0)])

    def _roll_back(self, slot: Slot, length: int, *, for_drafts: bool) -> None:
        """Both caches to a common length, at most `length`."""
        if self.drafter:
            if for_drafts:
                # Rows that only the target has must be decoded again for their hidden states.
                length = min(length, self.drafter.length(slot.seq))
            self.drafter.truncate(slot.seq, length)
        if length < len(slot.cached):
            if not self.target.truncate(slot.seq, length):
                self._forget(slot)
            else:
                del slot.cached[length:]

    def _forget(self, slot: Slot) -> None:
        slot.cached.clear()
        slot.pending = []
        self.target.clear(slot.seq)
        if self.drafter:
            self.drafter.truncate(slot.seq, 0)


def _is_count(value: object, least: int) -> bool:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and value >= least  # type: ignore[operator]


def _checked(draft: Draft) -> Draft:
    if draft.parents != list(range(ANCHOR, len(draft) - 1)):
        raise InputError("this engine verifies chains; the drafter proposed a tree")
    return draft
