"""A round over N sequences: draft, verify, accept. What is accepted is the next injection."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from dflash_local.caches import Caches
from dflash_local.controller import Controller
from dflash_local.draft import Draft
from dflash_local.draft_shape import Bounds, allowed, as_chain, as_tree
from dflash_local.drafter import DraftRequest
from dflash_local.drawing import draw
from dflash_local.errors import GrammarError
from dflash_local.features import StoredFeatures
from dflash_local.policy import Policy
from dflash_local.sampling import not_finite
from dflash_local.sequence import Sequence
from dflash_local.tree_survival import TreeSurvival, path_chances
from dflash_local.verify import Verdict, verify
from dflash_local.verify_batch import VerifyBatch

_NO_DRAFT = Draft.chain([])
_NO_TOKEN = -1
_MOST_WITH_A_DRAFT = 16
"""Rows to inject that a draft takes along: those of a round, so that drafts take alike long."""
_AHEAD_S, _MOST_AHEAD = 0.004, 16
"""What is decoded ahead, in seconds and steps: it delays the answer on its way, and a cancel."""
_TO_WARM_UP = 2
"""Steps after a change of width, whose graphs are built and captured: their time is no step's."""

Verifier: TypeAlias = Callable[[Draft, Callable[[int], int], Callable[[int], bool]], Verdict]


class Rounds:
    """Takes sequences whose prompt is decoded a round further."""

    def __init__(self, caches: Caches, controller: Controller | None) -> None:
        self.target = caches.target
        self.drafter = caches.drafter
        self.controller = controller if caches.drafter else None
        self.verifier: Verifier = verify
        self.judge: Callable[[Draft], Draft] = _as_it_is
        self._caches = caches
        self._n_branches = caches.target.options.n_branches
        self._max_width = caches.drafter.block_size if caches.drafter else 0
        self._step_s = 1.0  # of a plain step, lately
        self._last_rows = 0
        self._n_builds = 0  # of draft graphs
        self._warming_up = 0  # drafts until the last of these is at its speed

    def run(self, sequences: List[Sequence]) -> None:
        """One round of all of these, or some plain ones. Raises as `Target.decode`, and what the
        drafter raises; what goes wrong with one sequence alone is its `error`."""
        sequences = self._with_room(sequences)
        if not sequences:
            return
        start = time.perf_counter()
        limits = self._limits(sequences)
        wanted = self._wanted(sequences, limits)
        if not any(wanted):
            self._decode_plainly(sequences, start)
            return
        self._catch_up(sequences, wanted)
        began = time.perf_counter()
        drafts = self._draft(sequences, wanted, limits)
        drafted = time.perf_counter()
        n_drafting = sum(map(bool, wanted))
        draft_s = self._usual_draft_s(drafted - began, n_drafting)
        n_rebuilds = self.target.n_rebuilds
        batch = self._decode(sequences, drafts)
        n_rebuilds = self.target.n_rebuilds - n_rebuilds
        verified = time.perf_counter()
        for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            sampling = time.perf_counter()
            with self._alone(sequence):
                verdict = self._match(sequence, draft, batch.first_rows[i])
                sequence.stats.sample_s += time.perf_counter() - sampling
                self._accept(sequence, draft, verdict, batch, i)
        end = time.perf_counter()
        for sequence in sequences:
            stats = sequence.stats
            stats.draft_s += drafted - start
            stats.verify_s += verified - drafted
            stats.decode_s += end - start
            stats.graph_rebuilds += n_rebuilds
        if self.controller and any(s.policy is not None for s in sequences):
            self.controller.observe_round(
                len(batch.tokens),
                n_drafting,
                self._caches.depth,
                draft_s,
                verified - drafted,
                end - verified,
                forked=any(batch.lines),
                rebuilt=n_rebuilds > 0,
            )

    def _usual_draft_s(self, seconds: float, n_drafting: int) -> float:
        """What the draft stage takes when its graph is there: the first draft with a graph makes
        it, on a GPU the second captures it, and no later one will."""
        n_builds = getattr(self.drafter, "n_builds", 0)
        if n_builds != self._n_builds:
            self._n_builds, self._warming_up = n_builds, 1 + _TO_WARM_UP
        if self._warming_up and n_drafting:
            self._warming_up -= 1
            if self.controller:
                return min(seconds, self.controller.costs.draft_s(n_drafting, self._caches.depth))
        return seconds

    @contextmanager
    def _alone(self, sequence: Sequence) -> Iterator[None]:
        """What its sampler or its `on_token` raises ends this sequence, its cache emptied, and is
        no matter to the others."""
        try:
            yield
        except Exception as error:
            sequence.fail(error)
            self._caches.forget(sequence.slot)

    def _with_room(self, sequences: List[Sequence]) -> list[Sequence]:
        """Those whose anchor fits the context; the rest have reached its end."""
        self._caches.make_room(sum(1 + self._most_nodes(s) for s in sequences))
        room = self._caches.free_cells
        for sequence in sequences[max(room, 0) :]:
            sequence.finish_reason = "length"
        return list(sequences[: max(room, 0)])

    def _forks(self, sequence: Sequence) -> bool:
        """Whether its drafts are trees."""
        if sequence.policy is not None:
            return sequence.policy.forks
        return self._n_branches > 1 and sequence.request.draft_shape != "chain"

    def _most_nodes(self, sequence: Sequence) -> int:
        width = sequence.request.draft_width
        if width != "auto":
            return max(width - 1, 0)
        if self.controller and self._forks(sequence):
            return self.controller.n_nodes
        return max(self._max_width - 1, 0)

    def _limits(self, sequences: List[Sequence]) -> list[int]:
        """The most drafts that each may verify: what can be emitted, and has room."""
        room = min(self._caches.free_cells, self.target.n_batch)
        free = room - len(sequences)  # the anchors
        limits = []
        for sequence in sequences:
            limit = min(self._most_nodes(sequence), free)
            if sequence.remaining is not None:
                deepest = sequence.remaining - 1
                # Of a tree this bounds the depth alone, but one that has none is no tree.
                if deepest < 1 or not self._forks(sequence):
                    limit = min(limit, deepest)
            limits.append(max(limit, 0))
            free -= limits[-1]
        return limits

    def _wanted(self, sequences: List[Sequence], limits: List[int]) -> list[int]:
        """How many tokens to draft for each; 0 decodes it plainly this time."""
        if self.drafter is None:
            return [0] * len(sequences)
        # Always a whole width: a graph of another size would be another graph.
        wanted = [
            0 if s.request.draft_width == "auto" or limit < 1 else self._n_positions(s)
            for s, limit in zip(sequences, limits, strict=True)
        ]
        if self.controller:
            left, policies = _policies(sequences)
            if left:
                chosen = self.controller.n_drafts(
                    policies, [limits[i] for i in left], len(sequences) - len(left)
                )
                for i, n in zip(left, chosen, strict=True):
                    wanted[i] = n
        return wanted

    def _n_positions(self, sequence: Sequence) -> int:
        return min(self._most_nodes(sequence), self._max_width - 1)

    def _catch_up(self, sequences: List[Sequence], wanted: List[int]) -> None:
        """A prompt, or what plain decoding left, goes to the drafter apart from the draft."""
        for sequence, n in zip(sequences, wanted, strict=True):
            if n and len(sequence.slot.pending) > _MOST_WITH_A_DRAFT:
                self._caches.inject(sequence.slot)

    def _draft(
        self, sequences: List[Sequence], wanted: List[int], limits: List[int]
    ) -> list[Draft]:
        """A draft per sequence, as far as it shall be verified; empty for those without."""
        drafts = [_NO_DRAFT] * len(sequences)
        places = [i for i, n in enumerate(wanted) if n]
        if not places or self.drafter is None:
            return drafts
        requests = [
            DraftRequest(
                sequences[i].slot.seq,
                sequences[i].anchor,
                StoredFeatures(self.target, sequences[i].slot.pending),
                wanted[i],
            )
            for i in places
        ]
        for i, draft in zip(places, self.drafter.draft(requests), strict=True):
            sequences[i].slot.pending = []
            proposed = self._shaped(sequences[i], self.judge(draft), limits[i])
            # What the grammar forbids would be rejected, whatever the target thinks of it.
            try:
                drafts[i] = allowed(proposed, sequences[i].sampler.n_valid)
            except GrammarError:
                drafts[i] = _NO_DRAFT  # if it stands in the way of the answer too, the draw tells
        self._choose_widths(sequences, drafts, limits)
        return drafts

    def _shaped(self, sequence: Sequence, draft: Draft, limit: int) -> Draft:
        """A drafter's proposal, as far as there is room for it."""
        n_vocab = self.target.n_vocab
        if not self._forks(sequence):
            return as_chain(draft, n_vocab).clip(limit)
        left = sequence.remaining
        depth = limit if left is None else min(limit, left - 1)
        bounds = Bounds(limit, depth, self._n_branches - 1)
        raw, policy = draft.candidates, sequence.policy
        if policy is not None and raw is not None and isinstance(policy.survival, TreeSurvival):
            draft = replace(draft, candidates=policy.survival.calibrated(raw))
        return replace(as_tree(draft, n_vocab, bounds), candidates=raw)

    def _choose_widths(
        self, sequences: List[Sequence], drafts: list[Draft], limits: List[int]
    ) -> None:
        if not self.controller:
            return
        left, policies = _policies(sequences)
        if not left:
            return
        widths = self.controller.widths(
            policies,
            [
                path_chances(drafts[i]) if policy.forks else drafts[i].logprobs
                for i, policy in zip(left, policies, strict=True)
            ],
            [limits[i] for i in left],
        )
        for i, width in zip(left, widths, strict=True):
            drafts[i] = drafts[i].clip(width - 1)

    def _decode_plainly(self, sequences: List[Sequence], start: float) -> None:
        """A plain round, or several at once."""
        n = len(sequences)
        rebuilds = self.target.n_rebuilds
        if all(sequence.takes_best for sequence in sequences):
            steps = self._decode_ahead(sequences)
            decoded = sampled = time.perf_counter()
        else:
            self._decode(sequences, [_NO_DRAFT] * n)
            decoded = time.perf_counter()
            steps = [[_NO_TOKEN] * n]
            for row, sequence in enumerate(sequences):
                with self._alone(sequence):
                    steps[0][row] = draw(self.target, sequence, row, row)
            sampled = time.perf_counter()
        rebuilds = self.target.n_rebuilds - rebuilds
        self._last_rows = n
        seconds = (decoded - start) / len(steps)
        self._step_s += (seconds - self._step_s) / 4
        for i, sequence in enumerate(sequences):
            if sequence.finish_reason is None:
                with self._alone(sequence):
                    self._emit_steps(sequence, [step[i] for step in steps], i, n)
        end = time.perf_counter()
        for sequence in sequences:
            stats = sequence.stats
            stats.verify_s += decoded - start
            stats.sample_s += sampled - decoded
            stats.decode_s += end - start
            stats.graph_rebuilds += rebuilds
        if self.controller and any(s.policy is not None for s in sequences):
            self.controller.skip(len(steps) - 1)
            depth, host_s = self._caches.depth, (end - decoded) / len(steps)
            self.controller.observe_round(n, 0, depth, 0.0, seconds, host_s, rebuilt=rebuilds > 0)

    def _decode_ahead(self, sequences: List[Sequence]) -> list[list[int]]:
        """As many steps as take less time than a reader could notice: what Python does between two
        passes costs a small model more than a tenth of its speed."""
        n = len(sequences)
        left = [s.remaining for s in sequences if s.remaining is not None]
        by_time = int(_AHEAD_S / self._step_s) + 1
        most = _MOST_AHEAD if n == self._last_rows else _TO_WARM_UP
        n_steps = min([*left, self._caches.free_cells // n, by_time, most])
        if self.controller and any(s.policy is not None for s in sequences):
            n_steps = min(n_steps, self.controller.idle + 1)
        return self._caches.decode_ahead(
            [s.anchor for s in sequences],
            [len(s.slot.cached) for s in sequences],
            [s.slot.seq for s in sequences],
            max(n_steps, 1),
        )

    def _emit_steps(self, sequence: Sequence, tokens: List[int], place: int, n: int) -> None:
        """What a sequence has decoded plainly, up to its end; rows beyond are forgotten."""
        slot = sequence.slot
        first = self.target.first_stored + place
        ends_text = self.target.vocabulary.ends_text
        for step, token in enumerate(tokens):
            if token < 0:
                raise not_finite()
            slot.cached.append(sequence.anchor)
            if self.drafter and sequence.keeps_features:
                slot.pending.append(first + step * n)
            elif slot.pending:
                slot.pending = []  # it has given up drafting
            sequence.stats.record_round(drafted=0, emitted=1)
            if sequence.emit(token, ends_text=ends_text(token)):
                if step + 1 < len(tokens):
                    self.target.truncate(slot.seq, len(slot.cached))
                return

    def _decode(self, sequences: List[Sequence], drafts: List[Draft]) -> VerifyBatch:
        """One batch, [anchor, drafts] of every sequence."""
        batch = VerifyBatch(self._n_branches)
        for sequence, draft in zip(sequences, drafts, strict=True):
            slot, forks = sequence.slot, self._forks(sequence)
            batch.add(slot.seq, len(slot.cached), sequence.anchor, draft, forks=forks)
        n = len(batch.tokens)
        self._caches.decode(
            batch.tokens, batch.positions, batch.seq_ids, [True] * n, batch.all_lines
        )
        self._last_rows = n
        return batch

    def _match(self, sequence: Sequence, draft: Draft, first_row: int) -> Verdict:
        vocabulary = self.target.vocabulary
        return self.verifier(
            draft,
            lambda row: draw(self.target, sequence, first_row + row, first_row + row),
            lambda token: sequence.emit(token, ends_text=vocabulary.ends_text(token)),
        )

    def _accept(
        self, sequence: Sequence, draft: Draft, verdict: Verdict, batch: VerifyBatch, place: int
    ) -> None:
        """Keep the accepted rows of the caches; their hidden states are the next injection."""
        slot = sequence.slot
        n_emitted = len(verdict.tokens)
        begin = len(slot.cached)
        path, lines = verdict.path, batch.lines[place]
        anchor = (sequence.tokens[-n_emitted - 1],)
        slot.cached += anchor + tuple(draft.tokens[row - 1] for row in path[1:])
        if lines is not None:
            self.target.settle(slot.seq, begin, lines, path)
        elif len(path) < 1 + len(draft):
            self.target.truncate(slot.seq, len(slot.cached))
        if self.drafter and sequence.keeps_features:
            first = self.target.first_stored + batch.first_rows[place]
            slot.pending += [first + row for row in path]
        sequence.from_draft[-n_emitted:-1] = [True] * (n_emitted - 1)
        sequence.stats.record_round(
            drafted=len(draft), emitted=n_emitted, depth=max(draft.depths, default=0)
        )
        if lines is not None:
            on_side = draft.leaves_first([row - 1 for row in path[1:]])
            sequence.stats.record_tree(leaves=len(draft.leaves), on_side=on_side)
        if sequence.policy is not None and self.controller and draft:
            self._tell(self.controller, sequence.policy, draft, verdict)

    @staticmethod
    def _tell(controller: Controller, policy: Policy, draft: Draft, verdict: Verdict) -> None:
        """The controller what became of a draft."""
        accepted = len(verdict.path) - 1
        if isinstance(policy.survival, TreeSurvival) and draft.candidates is not None:
            controller.observe_tree(policy, draft.candidates, verdict.tokens, accepted)
        else:
            controller.observe(policy, draft.logprobs, len(draft), accepted)

    def emit_first(self, sequence: Sequence, row: int, output_row: int) -> None:
        """The token after the last row of a prompt."""
        with self._alone(sequence):
            token = draw(self.target, sequence, row, output_row)
            sequence.emit(token, ends_text=self.target.vocabulary.ends_text(token))
            sequence.stats.emitted += 1


def _policies(sequences: List[Sequence]) -> tuple[list[int], list[Policy]]:
    """The places of the sequences that are left to the controller, and their policies."""
    found = [(i, s.policy) for i, s in enumerate(sequences) if s.policy is not None]
    return [i for i, _ in found], [policy for _, policy in found]


def _as_it_is(draft: Draft) -> Draft:
    return draft
