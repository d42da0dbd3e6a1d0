"""Requests to sequences in slots, and these step by step to their end. Knows token ids only."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as List
from contextlib import ExitStack

from dflash_local import scheduler
from dflash_local.caches import Caches
from dflash_local.controller import Controller, Policy
from dflash_local.draft import Draft
from dflash_local.draft_shape import DraftShape
from dflash_local.drafter import Drafter
from dflash_local.guide import Guide
from dflash_local.reuse import LEAST_GAIN
from dflash_local.rounds import Rounds, Verifier
from dflash_local.sampling import Sampler
from dflash_local.scheduler import Prompt
from dflash_local.sequence import Request, Sequence, Slot
from dflash_local.stats import Stats
from dflash_local.target import Target
from dflash_local.target_options import MAX_OUTPUT_ROWS


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
        self.usual_shape: DraftShape = "chain"
        """Of the drafts of requests that name none."""
        self._rounds = Rounds(self.caches, self.controller)
        self._n_steps = 0
        self._rows_per_s = 0.0  # of prompts, lately
        self._round_s = 0.0

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
        """What a drafter's proposals pass through: as they are. A benchmark whose verifier does not
        go by the target puts in what they are worth to that one."""
        return self._rounds.judge

    @judge.setter
    def judge(self, judge: Callable[[Draft], Draft]) -> None:
        self._rounds.judge = judge

    @property
    def max_width(self) -> int:
        """The widest verify pass of chains: the drafter's block, 0 without a drafter."""
        return self.drafter.block_size if self.drafter else 0

    def widest(self, shape: DraftShape) -> int:
        """The widest verify pass of drafts of that shape."""
        return MAX_OUTPUT_ROWS if self.takes_trees and shape != "chain" else self.max_width

    @property
    def takes_trees(self) -> bool:
        """Whether drafts may be trees: where the target was loaded to fork."""
        return self.drafter is not None and self.target.options.n_branches > 1

    @property
    def chains_because(self) -> str | None:
        """One line on why all drafts are chains, whatever is asked for; None where they need not
        be, and without a drafter."""
        if self.drafter is None or self.takes_trees:
            return None
        if not hasattr(self.drafter, "top_k"):
            return "drafts are chains: this drafter gives no choice of tokens for a position"
        return (
            "drafts are chains: the model was loaded for them, or for more slots than llama.cpp "
            "has sequence ids to fork"
        )

    def check(self, request: Request) -> None:
        """Raises InputError, ContextFullError for what cannot be begun."""
        width = self.widest(request.draft_shape)
        request.check(self.target.n_vocab, self.target.n_ctx, width)

    def begin(self, request: Request) -> Sequence:
        """Take the free slot that has most of the prompt in its caches, and keep what is common.

        Raises what `check` and `Sampler` raise, and InputError when no slot is free.
        """
        begun_at = time.perf_counter()
        self.check(request)
        sampler = Sampler(
            request.sampling,
            self.target.n_vocab,
            n_ctx=self.target.n_ctx,
            constraint=request.constraint or self.guide.constraint(request.sampling),
        )
        sampler.accept_prompt(request.prompt)
        policy = None
        if self.controller is not None and request.draft_width == "auto":
            policy = self.controller.open(
                self.caches.depth, greedy=request.sampling.greedy, shape=request.draft_shape
            )
        slot = self._take(request, request.prompt, policy)
        stats = Stats(prompt_tokens=len(request.prompt), cached_tokens=len(slot.cached))
        return Sequence(
            request, slot, sampler, stats, policy, turn=self._n_steps, begun_at=begun_at
        )

    def _take(self, request: Request, text: list[int], policy: Policy | None) -> Slot:
        # Where drafting does not pay, a prompt is not decoded again to give it another try.
        hopeful = self.controller is None or policy is None or self.controller.hopeful
        slot, n_cached = self.caches.take(
            text if request.cache_prompt else text[:1],
            for_drafts=request.drafts and hopeful,
            unless_resigned=policy is not None,
        )
        if policy is not None and self.drafter is not None:
            policy.off = policy.off or self.drafter.length(slot.seq) < n_cached
        return slot

    def end(self, sequence: Sequence) -> None:
        """Give the slot back, its caches at the same token, if need be empty. Safe to call again.

        Raises what the drafter raises.
        """
        sequence.sampler.close()
        if sequence.finish_reason is None:
            sequence.finish_reason = "cancelled"
        if sequence.policy is not None:
            sequence.stats.drafting = sequence.policy.reason
            sequence.stats.warning = sequence.policy.warning
        request, chains = sequence.request, self.chains_because
        if chains and request.drafts and request.draft_shape == "tree":
            parts = sequence.stats.drafting, chains
            sequence.stats.drafting = "; ".join(part for part in parts if part)
        self.suspend(sequence)

    def suspend(self, sequence: Sequence) -> None:
        """Give the slot back for now; nothing of the answer is lost. Raises what the drafter
        raises."""
        if not sequence.has_slot:
            return
        sequence.has_slot = False
        slot = sequence.slot
        if sequence.policy is not None and sequence.policy.off:
            slot.resigned = True
            slot.pending = []
        self.caches.give_back(slot)

    def resume(self, sequence: Sequence) -> None:
        """Give a suspended sequence a free slot. What the caches have lost of its text is decoded
        like a prompt, then it goes on. Raises InputError when no slot is free."""
        request = sequence.request
        sequence.slot = self._take(request, sequence.text, sequence.policy)
        sequence.has_slot = True
        sequence.turn = self._n_steps

    def has_room(self, sequences: List[Sequence]) -> bool:
        """Whether these find the cells that they need before the next token of each: for the rest
        of the prompts, and for the anchors. Free slots are emptied for that."""
        n = sum(sequence.n_left or 1 for sequence in sequences)
        self.caches.make_room(n)
        return self.caches.free_cells >= n

    def step(self, sequences: List[Sequence]) -> None:
        """One chunk of the prompts that are not yet decoded, then one round of the others.

        What goes wrong with one sequence alone, in its sampler or its `on_token`, is its `error`,
        and ends it. Whatever is raised, all are over and their caches empty.
        """
        try:
            for sequence in sequences:
                if sequence.cancelled.is_set() and sequence.finish_reason is None:
                    sequence.finish_reason = "cancelled"
            at_work = [s for s in sequences if s.finish_reason is None]
            answering = [s for s in at_work if not s.in_prompt]
            self._prefill(at_work)
            # A first token goes out before its sequence's first round.
            start = time.perf_counter()
            self._rounds.run(answering)
            if answering:
                self._round_s += (time.perf_counter() - start - self._round_s) / 4
            self._n_steps += 1
        except BaseException:
            for sequence in sequences:
                self.caches.forget(sequence.slot)
                sequence.finish_reason = sequence.finish_reason or "cancelled"
            raise

    def run(self, sequences: List[Sequence]) -> None:
        """Step until all have finished, and give their slots back. Raises the first's error."""
        with ExitStack() as stack:
            for sequence in sequences:
                stack.callback(self.end, sequence)
            while any(sequence.finish_reason is None for sequence in sequences):
                self.step(sequences)
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error

    def forget_all(self) -> None:
        """Empty the caches of all free slots."""
        for slot in self.slots:
            if not slot.busy:
                self.caches.forget(slot)

    # Prompts, chunk by chunk

    def _chunks(self, sequences: List[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Whose prompt goes on in the next step, and with how many rows."""
        in_prompt = self._without_repeats([s for s in sequences if s.in_prompt])
        if not in_prompt:
            return [], []
        n_rows = scheduler.chunk_rows(
            self.target.n_batch,
            len(in_prompt) < len(sequences),
            self._rows_per_s,
            self._round_s,
        )
        rows = scheduler.share([Prompt(s.n_left, s.turn) for s in in_prompt], n_rows)
        served = [(s, n) for s, n in zip(in_prompt, rows, strict=True) if n]
        return [s for s, _ in served], [n for _, n in served]

    def _without_repeats(self, sequences: List[Sequence]) -> list[Sequence]:
        """Those whose prompt goes on, where several begin alike: what they have in common is
        decoded once, the others wait for it and take it over."""
        texts = [sequence.text for sequence in sequences]
        for sequence, text in zip(sequences, texts, strict=True):
            if sequence.request.cache_prompt:
                n = self.caches.catch_up(sequence.slot, text, for_drafts=sequence.keeps_features)
                sequence.stats.cached_tokens += n
        alike = [i for i, s in enumerate(sequences) if s.request.cache_prompt]
        going = scheduler.ahead(
            [texts[i] for i in alike], [len(sequences[i].slot.cached) for i in alike], LEAST_GAIN
        )
        waiting = set(alike) - {alike[i] for i in going}
        return [s for i, s in enumerate(sequences) if i not in waiting]

    def _prefill(self, sequences: List[Sequence]) -> None:
        """One batch of prompt rows, and the first token of each prompt that ends in it."""
        start = time.perf_counter()
        batch = _Batch()
        served, n_rows = self._chunks(sequences)
        self.caches.make_room(sum(sequence.n_left for sequence in served))
        room = self.caches.free_cells
        for sequence, n in zip(served, n_rows, strict=True):
            if sequence.n_left > room:  # other sequences have taken the rest
                sequence.finish_reason = "length"
            else:
                batch.add(sequence, n)
                room -= n
        if not batch.tokens:
            return
        self.caches.decode(batch.tokens, batch.positions, batch.seq_ids, batch.output)
        first = self.target.first_stored
        row = output_row = 0
        for sequence, n in zip(batch.sequences, batch.n_rows, strict=True):
            slot = sequence.slot
            slot.cached += batch.tokens[row : row + n]
            if self.drafter and sequence.keeps_features:
                slot.pending += range(first + row, first + row + n)
            row += n
            if batch.output[row - 1]:
                self._rounds.emit_first(sequence, row - 1, output_row)
                output_row += 1
            sequence.turn = self._n_steps
        now = time.perf_counter()
        if row >= scheduler.LEAST_ROWS:
            rate = row / (now - start)
            self._rows_per_s += (rate - self._rows_per_s) / 4 if self._rows_per_s else rate
        for sequence in batch.sequences:
            sequence.stats.prompt_s += now - start
            if len(sequence.tokens) <= 1:
                sequence.stats.ttft_s = now - sequence.begun_at + sequence.stats.queue_s


class _Batch:
    """Rows of some prompts."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.n_rows: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.seq_ids: list[int] = []
        self.output: list[bool] = []

    def add(self, sequence: Sequence, n: int) -> None:
        """The next n rows of a sequence. Of a prompt's last row alone the logits are wanted, and
        not where the token after it is known already."""
        slot = sequence.slot
        begin = len(slot.cached)
        text = sequence.text
        self.sequences.append(sequence)
        self.n_rows.append(n)
        self.tokens += text[begin : begin + n]
        self.positions += range(begin, begin + n)
        self.seq_ids += [slot.seq] * n
        self.output += [False] * (n - 1) + [not sequence.tokens and n == sequence.n_left]
