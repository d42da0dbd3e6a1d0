"""Clocks and counts of rounds, for the statistics and for the controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from dflash_local.controller.controller import Controller
from dflash_local.controller.costs import TO_MAKE
from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import ShapeName
from dflash_local.engine.accept import Verdict
from dflash_local.engine.sequence import Sequence
from dflash_local.engine.slots import Slots


class Meter:
    """Times rounds, one after the other."""

    def __init__(self, slots: Slots) -> None:
        self.controller: Controller | None = None
        self.step_s = 1.0
        """Seconds of a plain step, averaged over the last ones."""
        self.last_rows = 0
        """Rows of the target's last pass."""
        self.n_in_a_row = 0
        """The number of passes in succession that had so many rows."""
        self._slots = slots
        self._n_builds = 0  # draft graphs built, as last seen
        self._warming_up = 0  # drafts until the newest graph runs at full speed
        self.overlaps = slots.target.options.n_gpu_layers != 0
        """Whether a device drafts while this thread works."""
        self.when_told: Callable[[], None] = lambda: None
        """Called when a round has been told, such as to hand out its tokens."""
        # What the controller and the statistics are still to be told, of a round of these
        self._untold: list[Callable[[], None]] = []
        self._sequences: list[Sequence] = []

    @contextmanager
    def lap(self, sequences: list[Sequence]) -> Iterator[Lap]:
        """Time a round of these sequences. A round that raises is not counted.

        What a drafted round tells waits until a GPU drafts the next one: that is host work which a
        small model would wait for. It is told before where drafting is off, an answer has ended, or
        other sequences come.
        """
        if sequences != self._sequences:
            self.tell()
        lap = Lap(self, self._slots, sequences)
        yield lap
        self._untold.append(lap.end())
        waits = self.overlaps and lap.asked_drafter
        if self.controller and any(s.policy is not None for s in sequences):
            waits = waits and self.controller.may_wait
        if waits and all(s.finish_reason is None for s in sequences):
            self._sequences = sequences
        else:
            self.tell()

    def tell(self) -> None:
        """Tell the controller and the statistics of the last round, if they were not told."""
        if self._untold:
            untold, self._untold, self._sequences = self._untold, [], []
            for each in untold:
                each()
            self.when_told()

    @property
    def has_untold(self) -> bool:
        """Whether a round waits to be told."""
        return bool(self._untold)

    def count(self, sequence: Sequence, draft: Draft, verdict: Verdict, n_copied: int) -> None:
        """Count a draft and its accepted tokens, `n_copied` of them copies, when it is told."""
        self._untold.append(partial(self._count, sequence, draft, verdict, n_copied))

    def _count(self, sequence: Sequence, draft: Draft, verdict: Verdict, n_copied: int) -> None:
        sequence.shape.count(sequence.stats, draft, verdict.path)
        sequence.stats.record_copies(drafted=sum(draft.copied), accepted=n_copied)
        if self.controller and sequence.policy is not None and draft:
            self.controller.observe(sequence.policy, draft, verdict.tokens)

    def usual_draft_s(self, seconds: float, n_drafting: int) -> float:
        """The time of a draft stage without the time for building and recording its graph."""
        n_builds = self._slots.drafter.n_builds if self._slots.drafter else 0
        if n_builds != self._n_builds:
            self._n_builds, self._warming_up = n_builds, 1 + TO_MAKE
        if self._warming_up:
            self._warming_up -= 1
            if self.controller:
                return min(seconds, self.controller.draft_s(n_drafting))
        return seconds


class Lap:
    """The times of one round. Its stages call the methods in this order."""

    def __init__(self, meter: Meter, slots: Slots, sequences: list[Sequence]) -> None:
        self._meter = meter
        self._slots = slots
        self._sequences = sequences
        self._n_drafting = self._n_others = 0
        self._n_injected = 0
        self._inject_s = 0.0
        self._n_rebuilds = slots.target.native.n_rebuilds
        self._n_rows = len(sequences)
        self._n_steps = 1
        self._shape: ShapeName = "chain"
        self._draft_s = 0.0
        self._drawn_s = slots.target.native.draw_s
        self._start = self._began = self._drafted = self._verified = time.perf_counter()
        self._end, self._depth = self._start, 0

    @contextmanager
    def injecting(self, n_rows: int) -> Iterator[None]:
        """Time rows that are injected before the draft itself."""
        start = time.perf_counter()
        yield
        self._inject_s += time.perf_counter() - start
        self._n_injected += n_rows

    def drafting(self, sequences: list[Sequence]) -> None:
        """These sequences draft, with all their rows to inject."""
        self._n_drafting = len(sequences)
        self._n_others = sum(sequence.policy is None for sequence in sequences)
        n_rows = sum(len(sequence.slot.pending) for sequence in sequences)
        self._n_injected += n_rows
        self._began = time.perf_counter()

    def verifying(self) -> None:
        self._drafted = time.perf_counter()
        if self._slots.drafter is None:  # it has failed, which says nothing of what a draft takes
            self._n_drafting = 0
        if self._n_drafting:
            seconds = self._drafted - self._began
            self._draft_s = self._meter.usual_draft_s(seconds, self._n_drafting)

    def accepting(self, n_rows: int, shape: ShapeName = "chain", n_steps: int = 1) -> None:
        """The target's pass over `n_rows` rows is over, or `n_steps` plain steps of as many, which
        drew their tokens in between."""
        draw_s = self._slots.target.native.draw_s - self._drawn_s
        for sequence in self._sequences:
            sequence.stats.sample_s += draw_s
        self._verified = time.perf_counter() - draw_s
        self._n_steps = n_steps
        self._n_rows = n_rows
        meter = self._meter
        meter.n_in_a_row = n_steps + (meter.n_in_a_row if n_rows == meter.last_rows else 0)
        meter.last_rows = n_rows
        self._shape = shape

    @contextmanager
    def sampling(self, sequence: Sequence) -> Iterator[None]:
        """Time the draws of one sequence."""
        start = time.perf_counter()
        try:
            yield
        finally:
            sequence.stats.sample_s += time.perf_counter() - start

    @property
    def asked_drafter(self) -> bool:
        """Whether the drafter had a part in it."""
        return self._n_drafting > 0

    def end(self) -> Callable[[], None]:
        """Stop the clock. Returns the function that tells what it has shown."""
        self._end = time.perf_counter()
        self._n_rebuilds = self._slots.target.native.n_rebuilds - self._n_rebuilds
        self._depth = self._slots.depth
        return self._tell

    def _tell(self) -> None:
        end, n_steps, n_rebuilds = self._end, self._n_steps, self._n_rebuilds
        for sequence in self._sequences:
            stats = sequence.stats
            stats.draft_s += self._drafted - self._start
            stats.verify_s += self._verified - self._drafted
            stats.decode_s += end - self._start
            stats.graph_rebuilds += n_rebuilds
        verify_s = (self._verified - self._drafted) / n_steps
        if not self._n_drafting and self._n_rows == len(self._sequences):
            step_s = (end - self._drafted) / n_steps  # with its draws
            self._meter.step_s += (step_s - self._meter.step_s) / 4
        controller = self._meter.controller
        if controller and any(s.policy is not None for s in self._sequences):
            controller.observe_round(
                self._n_rows,
                self._shape,
                self._n_drafting,
                self._depth,
                self._draft_s,
                verify_s,
                (end - self._verified) / n_steps,
                n_steps=n_steps,
                rebuilt=n_rebuilds > 0,
                n_injected=self._n_injected,
                inject_s=self._inject_s,
                n_others=self._n_others,
            )
