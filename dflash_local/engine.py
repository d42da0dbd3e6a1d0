"""Requests to sequences in slots, and these step by step to their end. Knows token ids only."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import ExitStack

from dflash_local.caches import Caches
from dflash_local.controller import Controller
from dflash_local.draft import Draft
from dflash_local.drafter import Drafter
from dflash_local.errors import InputError
from dflash_local.guide import Guide
from dflash_local.rounds import Rounds, Verifier
from dflash_local.sampling import Sampler
from dflash_local.sequence import Request, Sequence, Slot
from dflash_local.stats import Stats
from dflash_local.target import Target


class Engine:
    """Slots of a target and, if there is one, a drafter. One thread owns it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        n_seq: int = 1,
        controller: Controller | None = None,
    ) -> None:
        """`controller` decides for requests of width "auto"; without one they decode plainly."""
        self.target = target
        self.drafter = drafter
        self.controller = controller if drafter else None
        self.caches = Caches(target, drafter, n_seq)
        self.guide = Guide(target.vocabulary)
        self._rounds = Rounds(self.caches, self.controller)

    @property
    def slots(self) -> list[Slot]:
        return self.caches.slots

    @property
    def verifier(self) -> Verifier:
        """How drafts are checked. A benchmark may put another one in place of `verify`."""
        return self._rounds.verifier

    @verifier.setter
    def verifier(self, verifier: Verifier) -> None:
        self._rounds.verifier = verifier

    @property
    def judge(self) -> Callable[[Draft], Draft]:
        """What drafts pass through before they are checked: as they are. A benchmark whose verifier
        does not go by the target puts in what drafts are worth to that one."""
        return self._rounds.judge

    @judge.setter
    def judge(self, judge: Callable[[Draft], Draft]) -> None:
        self._rounds.judge = judge

    @property
    def max_width(self) -> int:
        """The widest verify pass: the drafter's block, 0 without a drafter."""
        return self.drafter.block_size if self.drafter else 0

    def check(self, request: Request) -> None:
        """Raises InputError, ContextFullError for what cannot be begun."""
        request.check(self.target.n_vocab, self.target.n_ctx, self.max_width)

    def begin(self, request: Request) -> Sequence:
        """Take the free slot that has most of the prompt in its caches, and keep what is common.

        Raises what `check` and `Sampler` raise, and InputError when no slot is free.
        """
        self.check(request)
        sampler = Sampler(
            request.sampling,
            self.target.n_vocab,
            n_ctx=self.target.n_ctx,
            constraint=self.guide.constraint(request.sampling),
        )
        sampler.accept_prompt(request.prompt)
        policy, hopeful = None, True
        if self.controller is not None and request.draft_width == "auto":
            policy = self.controller.open(self.caches.depth, greedy=request.sampling.greedy)
            hopeful = self.controller.hopeful
        # Where drafting does not pay, a prompt is not decoded again to give it another try.
        slot, n_cached = self.caches.take(
            request.prompt,
            for_drafts=request.drafts and hopeful,
            unless_resigned=policy is not None,
        )
        if policy is not None and self.drafter is not None:
            policy.off = self.drafter.length(slot.seq) < n_cached
        stats = Stats(prompt_tokens=len(request.prompt), cached_tokens=n_cached)
        return Sequence(request, slot, sampler, stats, policy)

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
        if sequence.policy is not None:
            sequence.stats.drafting = sequence.policy.reason
            sequence.stats.warning = sequence.policy.warning
            if sequence.policy.off:
                slot.resigned = True
                slot.pending = []
        self.caches.give_back(slot)

    def step(self, sequences: List[Sequence]) -> None:
        """One chunk of each prompt that is not yet decoded, then one round of the others.

        Whatever is raised, these sequences are over and their caches empty.
        """
        try:
            answering = [s for s in sequences if not s.in_prompt]
            for sequence in sequences:
                if sequence.cancelled.is_set() and sequence.finish_reason is None:
                    sequence.finish_reason = "cancelled"
                elif sequence.finish_reason is None and sequence.in_prompt:
                    self._prefill(sequence)
            # A first token goes out before its sequence's first round.
            self._rounds.run([s for s in answering if s.finish_reason is None])
        except BaseException:
            for sequence in sequences:
                self.caches.forget(sequence.slot)
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
                self.caches.forget(slot)

    # A prompt, chunk by chunk

    def _prefill(self, sequence: Sequence) -> None:
        start = time.perf_counter()
        slot, prompt = sequence.slot, sequence.request.prompt
        begin = len(slot.cached)
        chunk = prompt[begin : begin + self.target.n_batch]
        last = begin + len(chunk) == len(prompt)
        self.caches.make_room(len(chunk))
        if self.caches.free_cells < len(chunk):  # other sequences have taken the rest
            sequence.finish_reason = "length"
            return
        self.caches.decode(
            chunk,
            range(begin, begin + len(chunk)),
            [slot.seq] * len(chunk),
            [False] * (len(chunk) - 1) + [last],
        )
        slot.cached += chunk
        if self.drafter and sequence.keeps_features:
            first = self.target.first_stored
            slot.pending += range(first, first + len(chunk))
        stats = sequence.stats
        if last:
            token = self._rounds.draw(sequence, len(chunk) - 1, 0)
            sequence.emit(token, ends_text=self.target.vocabulary.ends_text(token))
            stats.emitted += 1
        stats.prompt_s += time.perf_counter() - start
        stats.ttft_s = stats.prompt_s
