"""Measures the costs of a round's parts on this machine, in a few seconds."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median

import numpy as np

from dflash_local.controller.costs import LEAST, ROW_COUNTS, TO_MAKE, Costs
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.errors import InputError
from dflash_local.fit.options import MAX_ROWS_AT_HOME
from dflash_local.sampling.sampler import not_finite
from dflash_local.target_model.batch import Batch, Outputs
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import StateCheckpoint, Target

SHALLOW = 4
"""Cached tokens of each sequence after which is measured, and rows that a usual round injects."""
DEEP = (1024, 8192)
"""The same in all, for the cost of a further cached token: the last for which there is time."""
ENVIRONMENT = "DFLASH_LOCAL_CALIBRATION_S"
BUDGET_S = 3.0
"""Seconds where that variable says nothing. Lower it for a fast start at a fixed width."""
BUDGET_STEPS = 600
"""Passes at most. Without it, a tiny model would be measured for as long as a large one."""
_TIMED = 3  # with one, a single hiccup decides what a cached token is thought to cost


def budget_s() -> float:
    """Seconds that a calibration may take: those of `DFLASH_LOCAL_CALIBRATION_S`, else `BUDGET_S`.
    Raises InputError for any other value."""
    given = os.environ.get(ENVIRONMENT) or str(BUDGET_S)
    with suppress(ValueError):
        if 0 < (seconds := float(given)) < math.inf:
            return seconds
    raise InputError(f"{ENVIRONMENT} is {given!r}; expected seconds above 0, such as {BUDGET_S:g}")


def measure(target: Target, drafter: Drafter | None) -> Costs:
    """The costs of this pair, or of a target alone, for up to `target.options.n_seq` sequences.

    Takes `budget_s()` seconds or `BUDGET_STEPS` target steps, whichever end first, but always wakes
    the model with a pass, and takes the time of two drafts, two plain steps and two of two rows.
    Times that differ too much (`Costs.noise`), or too few to tell, are taken a second time. Less
    than `BUDGET_S` asks for a rough idea, which is not judged. All caches must be empty, and are
    after it. Raises as `budget_s`, `Target.run` and the drafter.
    """
    trial = _Trial(target, drafter)
    try:
        costs = trial.run()
        n_plain = len(trial.steps[trial.depth][trial.n_seq])
        if trial.budget_s >= BUDGET_S and (costs.noise or n_plain < _TIMED):
            costs = trial.run()
    finally:
        trial.empty()
    return costs


class _Trial:
    """One calibration: passes and drafts on random tokens, timed within the budget."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        # As many sequences as there is room for, each with two rows
        self.n_seq = min(target.options.n_seq, target.n_ctx_all // (SHALLOW + 2), target.n_batch)
        self.budget_s = budget_s()
        self.warm_up = 1 + TO_MAKE if target.options.n_gpu_layers else 1
        self.rng = np.random.default_rng(0)
        self.part = 0  # cached tokens of each sequence
        self.starts: list[StateCheckpoint] = []  # of each sequence, when it had just these
        # Seconds: of passes by depth (cached tokens) and rows; of draft stages by depth, sequences,
        # tokens and rows to inject; of what making graphs takes on top; of a tree on top, by depth
        self.steps: dict[int, dict[int, list[float]]] = {}
        self.drafts: dict[tuple[int, int, int, int], list[float]] = {}
        self.switches: list[float] = []
        self.trees: dict[int, float] = {}
        self.n_draft = max(min(drafter.block_size, target.max_width) - 1, 1) if drafter else 1
        room = min(target.n_batch, target.n_ctx_all - SHALLOW * self.n_seq) // self.n_seq
        counts = *ROW_COUNTS, MAX_ROWS_AT_HOME
        self.widths = [width for width in counts if width <= min(room, target.max_width)]
        # Rows to inject in a usual round, and so many that they are not lost in a draft's noise
        self.few = min(SHALLOW, target.n_batch)
        room = target.n_ctx_all // self.n_seq - SHALLOW
        self.many = min(max(ROW_COUNTS), target.n_batch, room)

    def run(self) -> Costs:
        """The costs by all times that were taken so far, those of an earlier run as well."""
        self.n_steps, self.end_s = 0, math.inf
        self._fill(SHALLOW)
        end_s = time.perf_counter() + self.budget_s
        self._draft(1)
        self._steps(self.widths[:2], 1)
        self.end_s = end_s
        self._measure(1, 2)
        self._tree()
        self._measure_deep()
        self._measure(2, 2, 2)
        return self._costs()

    def _costs(self) -> Costs:
        drafts: dict[int, dict[int, list[float]]] = {}
        for (depth, n_seqs, n_draft, n_rows), seconds in self.drafts.items():
            if (n_draft, n_rows) == (self.n_draft, self.few):
                drafts.setdefault(depth, {})[n_seqs] = seconds
        times = [*self.steps[self.depth].values(), *drafts.get(self.depth, {}).values()]
        spreads = [median(each) / min(each) - 1 for each in times if len(each) > 1]
        usual_s = median(drafts[self.depth][1]) if drafts else 0.0
        first_s = median(self.drafts.get((self.depth, 1, 1, self.few)) or [usual_s])
        injected_s = median(self.drafts.get((self.depth, 1, self.n_draft, self.many)) or [usual_s])
        return Costs(
            _least(self.steps),
            _least(drafts) or {SHALLOW: {1: 0.0}},
            switch_s=max(median(self.switches or [0.0]), 0.0),
            inject_s=max(injected_s - usual_s, 0.0) / max(self.many - SHALLOW, 1),
            # On a line from a draft of one token to the longest.
            token_share=max(usual_s - first_s, 0.0) / max(usual_s * (self.n_draft - 1), LEAST),
            trees=self.trees,
            spread=median(spreads or [0.0]) if self.budget_s >= BUDGET_S else 0.0,
            budget_s=self.budget_s,
        )

    def _measure(self, *times: int) -> None:
        """Passes and drafts at the present depth, in turn, so that a disturbance of one disturbs
        all; each so many times."""
        for timed in times:
            self._steps(self.widths, timed)
            if self.drafter is not None:
                for n_seqs in sorted({1, self.n_seq}):
                    self._draft(timed, n_seqs)
                if self.drafter.by_steps and self.n_draft > 1:
                    self._draft(timed, n_draft=1)
                if self.many > 2 * SHALLOW:
                    self._draft(1, n_rows=self.many)

    def _measure_deep(self) -> None:
        """Those that matter most, after as many tokens as there is time for."""
        # Room for a pass of all rows after it, and for a draft of many.
        room = self.target.n_ctx_all // self.n_seq - max(ROW_COUNTS)
        pass_s = self._guess(most := max(self.steps[self.depth]))
        row_s = pass_s / most  # a prompt's rows cost less, as the first fill will show
        widths = self.widths[: 1 + len(self.widths) // 2]  # few rows and many, for a line
        n_passes = len(widths) * (self.warm_up + _TIMED)
        for deep in DEEP:
            part = min(deep // self.n_seq, room)
            n_rows = self.n_seq * part
            n_steps = math.ceil(n_rows / self.target.n_batch) + n_passes
            # With fewer tokens more, what they cost would be lost in the noise.
            is_deep = self.n_seq * (part - self.part) >= max(ROW_COUNTS)
            if not is_deep or not self._affords(n_steps, n_rows * row_s + n_passes * pass_s):
                break
            begin = time.perf_counter()
            self._fill(part)
            row_s = (time.perf_counter() - begin) / n_rows
        if self.part > SHALLOW:
            self._steps(widths, _TIMED)
            self._draft(_TIMED)
            self._tree()
            self._fill(SHALLOW)

    @property
    def depth(self) -> int:
        return self.n_seq * self.part

    def _affords(self, n_steps: int, seconds: float) -> bool:
        in_time = time.perf_counter() + seconds <= self.end_s
        return in_time and self.n_steps + n_steps <= BUDGET_STEPS

    def _timed(self, run: Callable[[], float], n: int) -> tuple[list[float], float]:
        """Seconds of n runs after those that make graphs, and the extra of these."""
        seconds = [run() for _ in range(self.warm_up + n)]
        self.n_steps += len(seconds)
        first, rest = seconds[: self.warm_up], seconds[self.warm_up :]
        return rest, sum(first) - self.warm_up * median(rest)

    def _steps(self, widths: list[int], timed: int) -> None:
        """Time passes of so many rows at the present depth, if there is time: of each of all
        sequences together, and of one alone."""
        known, n = self.steps.setdefault(self.depth, {}), self.warm_up + timed
        for n_rows in dict.fromkeys(n for width in widths for n in (width * self.n_seq, width)):
            if self._affords(n, n * self._guess(n_rows)):
                seconds, made_s = self._timed(partial(self._random_pass, n_rows), timed)
                known.setdefault(n_rows, []).extend(seconds)
                if timed > 1:
                    self.switches.append(made_s)

    def _tree(self) -> None:
        """Time passes over a tree of one sequence beside those over a chain of as many rows: a
        path, and a leaf beside each of its nodes."""
        n, times = self.n_draft + 1, 2 * _TIMED
        # A batch has room for as many rows as a sequence has branches.
        room = min(self.target.options.n_branches, self.target.n_ctx_all - self.depth)
        n_passes = 2 * (self.warm_up + times)
        if n <= room and self._affords(n_passes, n_passes * self._guess(n)):
            path = list(range(-1, n // 2 - 1))
            parents = [*path, *path[: n - 1 - len(path)]]

            def tree() -> float:
                batch, tokens = Batch(), self._batch(n, n_seqs=1).tokens
                batch.add_tree(0, self.part, tokens[0], tokens[1:], parents)
                return self._pass(batch)

            chains, _ = self._timed(partial(self._random_pass, n, 1), times)
            trees, _ = self._timed(tree, times)
            self.trees[self.depth] = max(median(trees) - median(chains), 0.0)

    def _draft(self, timed: int, n_seqs: int = 1, n_draft: int = 0, n_rows: int = 0) -> None:
        """Time the draft stage of the first `n_seqs` sequences, if there is time: of so many
        tokens, after so many rows to inject in each; 0: of all, after the few of a usual round."""
        n_draft, n_rows = n_draft or self.n_draft, n_rows or self.few
        usual_s = n_seqs * median(next(iter(self.drafts.values()), [0.0]))
        drafter, seconds = self.drafter, (self.warm_up + timed) * usual_s + 2 * self._guess(n_rows)
        if drafter is None or not self._affords(1, seconds):
            return
        self._pass(batch := self._batch(n_rows, outputs="none"))
        features = self._features(batch, range(n_rows))
        requests = [DraftRequest(seq, 1, features, n_draft, whole=True) for seq in range(n_seqs)]

        def draft() -> float:
            begin = time.perf_counter()
            drafter.draft(requests)
            seconds = time.perf_counter() - begin
            for seq in range(n_seqs):
                drafter.truncate(seq, self.part)
            return seconds

        found, _ = self._timed(draft, timed)
        self.drafts.setdefault((self.depth, n_seqs, n_draft, n_rows), []).extend(found)

    def _guess(self, n_rows: int) -> float:
        """Seconds of a pass, if need be from the nearest narrower one timed, by the row."""
        known = self.steps.get(self.depth, {})
        near = max((n for n in known if n <= n_rows), default=0)
        return min(known[near]) * n_rows / near if near else 0.0

    def _fill(self, part: int) -> None:
        """Both caches to `part` tokens of each sequence."""
        self.empty()
        drafter, chunk = self.drafter, self.target.n_batch // self.n_seq
        for self.part in range(0, part, chunk):
            n = min(chunk, part - self.part)
            self.target.run(batch := self._batch(n * self.n_seq, self.n_seq, outputs="none"))
            if drafter is not None:
                for seq in range(self.n_seq):
                    drafter.inject(seq, self._features(batch, range(seq * n, (seq + 1) * n)))
        is_read = drafter is not None and self.target.n_features
        if is_read and not np.isfinite(self.target.hidden_states([0])).all():
            raise not_finite()  # or the drafter would be blamed for what it makes of them
        self.part = part
        self.starts = [self.target.checkpoint(seq, part) for seq in range(self.n_seq)]

    def empty(self) -> None:
        for seq in range(self.n_seq):
            self.target.clear(seq)
            if self.drafter is not None:
                self.drafter.truncate(seq, 0)

    def _batch(self, n_rows: int, n_seqs: int = 0, outputs: Outputs = "all") -> Batch:
        """Random rows, dealt to so many sequences as evenly as they go; 0: to as many as may be."""
        is_equal, batch = self.target.needs_equal_rows, Batch()
        n_seqs = n_seqs or (math.gcd(n_rows, self.n_seq) if is_equal else min(self.n_seq, n_rows))
        for seq in range(n_seqs):
            n = n_rows // n_seqs + (seq < n_rows % n_seqs)
            tokens = self.rng.integers(0, self.target.n_vocab, n).tolist()
            batch.add(seq, self.part, tokens, outputs=outputs)
        return batch

    def _random_pass(self, n_rows: int, n_seqs: int = 0) -> float:
        return self._pass(self._batch(n_rows, n_seqs))

    def _pass(self, batch: Batch) -> float:
        """Seconds of a pass, which is undone."""
        begin = time.perf_counter()
        self.target.run(batch)
        seconds = time.perf_counter() - begin
        if batch.shape == "tree":
            self.target.keep(batch.parts[0], [0])
        for seq, start in enumerate(self.starts):
            if not self.target.truncate(seq, start.length):
                self.target.restore(seq, start)
        return seconds

    def _features(self, batch: Batch, rows: range) -> Features:
        """Context features of these rows of the last pass, as the engine hands them over."""
        numbers = [self.target.feature_rows[row] for row in rows]
        return StoredFeatures(self.target, numbers, [batch.tokens[row] for row in rows])


def _least(times: dict[int, dict[int, list[float]]]) -> dict[int, dict[int, float]]:
    """The least of each, as other work of the machine only ever adds time."""
    return {depth: {n: min(found) for n, found in row.items()} for depth, row in times.items()}
