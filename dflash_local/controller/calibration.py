"""Measures the costs of a round's parts on this machine, in a few seconds, and keeps them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median

import numpy as np

from dflash_local.controller import records
from dflash_local.controller.costs import ROW_COUNTS, TO_MAKE, Costs
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.errors import InputError
from dflash_local.sampling.sampler import not_finite
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import StateCheckpoint, Target

SHALLOW = 4
"""Cached tokens of each sequence after which is measured, and rows that a usual round injects."""
DEEP = (1024, 8192)
"""The same in all, for the cost of a further cached token: the last for which there is time."""
ENVIRONMENT = "DFLASH_LOCAL_CALIBRATION_S"
BUDGET_S = 3.0
"""Seconds where that variable says nothing. Lower it for a fast start at a fixed width."""
BUDGET_STEPS = 400
"""Passes at most. Without it, a tiny model would be measured for as long as a large one."""
_TIMED = 3  # with one, a single hiccup decides what a cached token is thought to cost
_N_DEEP = 6  # row counts after many tokens, few rows and many, for a line through them
_TREE_ROWS = 16  # of the usual tree
_DEAREST = 1.2  # at most so many times the seconds of a pass of more rows

_MANY_ROWS = max(ROW_COUNTS)  # injected; with fewer, their share of a draft is lost in its noise


def budget_s() -> float:
    """Seconds that a calibration may take: those of `DFLASH_LOCAL_CALIBRATION_S`, else `BUDGET_S`.

    Raises InputError for any other value.
    """
    given = os.environ.get(ENVIRONMENT)
    if not given:
        return BUDGET_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(
            f"{ENVIRONMENT} is {given!r}; expected seconds above 0, such as {BUDGET_S:g}"
        )
    return seconds


def measure(
    target: Target, drafter: Drafter | None, *, before: Callable[[], None], again: bool = False
) -> Costs:
    """The costs of this pair, or of a target alone, for up to `target.options.n_seq` sequences,
    kept per machine, files, build and settings but the context; `again` measures them though they
    are kept.

    Takes `budget_s()` seconds or `BUDGET_STEPS` target steps, whichever end first, but always wakes
    the model with a pass, and takes the time of two drafts, two plain steps and two of two rows.
    Times that differ too much, or too few to tell, are taken a second time. Costs that are noisy
    even then (`Costs.noise`) are measured again at the next load, and those measured with a smaller
    budget at this one. A budget below `BUDGET_S` asks for a rough idea, which is not judged.
    `before` empties all caches of target and drafter: called only if there is something to measure,
    and they are empty after it too. Raises as `budget_s`, `Target.decode` and the drafter.
    """
    known = records.of(target, drafter)
    if not again:
        with suppress(ValueError):  # not measured yet, or damaged
            costs = Costs.from_dict(known)
            if costs.noise is None and costs.budget_s >= budget_s():
                return costs
    trial = _Trial(target, drafter)
    before()
    try:
        costs = trial.run()
        if not trial.is_rough and (costs.noise or trial.n_plain < _TIMED):
            costs = trial.run()
    finally:
        trial.empty()
    # What drafts and copies are worth is not measured here; `again` begins with nothing.
    records.write(target, drafter, ({} if again else known) | costs.as_dict())
    return costs


class _Trial:
    """One calibration: passes and drafts on random tokens, timed within the budget."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        # As many sequences as there is room for, each with two rows.
        most = min(target.n_ctx_all // (SHALLOW + 2), target.n_batch)
        self.n_seq = min(target.options.n_seq, most)
        self.budget_s = budget_s()
        self.is_rough = self.budget_s < BUDGET_S
        self.end_s = math.inf
        self.n_steps = 0
        self.part = 0  # cached tokens of each sequence
        self.tokens: list[int] = []  # of the last pass
        self.made_s = 0.0  # the extra of the last passes that made graphs
        self.starts: list[StateCheckpoint] = []  # of each sequence, when it had just these
        self.warm_up = 1 + TO_MAKE if target.options.n_gpu_layers else 1
        self.rng = np.random.default_rng(0)
        self.steps: dict[int, dict[int, list[float]]] = {}
        self.drafts: dict[int, dict[int, list[float]]] = {}
        self.firsts: list[float] = []  # drafts of one token
        most = min(drafter.block_size, target.max_width) if drafter else 0
        self.n_draft = max(most - 1, 1)
        self.switches: list[float] = []
        self.injections: list[float] = []
        self.trees: dict[int, float] = {}
        room = min(target.n_batch, target.n_ctx_all - SHALLOW * self.n_seq)
        most = min(room // self.n_seq, target.max_width)
        self.widths = [width for width in ROW_COUNTS if width <= most]

    def run(self) -> Costs:
        """The costs by all times that were taken so far, those of an earlier run as well."""
        self.n_steps, self.end_s = 0, math.inf
        features = self._fill(SHALLOW)
        self.end_s = time.perf_counter() + self.budget_s
        if features is not None:
            self._draft(1, 1, features)
        for n_rows in self._rows(self.widths[:2]):
            self._step(n_rows, 1, needed=n_rows in (self.n_seq, 2 * self.n_seq))
        self._measure((1, 2))
        self._tree()
        if self._measure_deep():
            self._fill(SHALLOW)
        self._measure((2, 2))
        return Costs(
            _usual(self.steps),
            _usual(self.drafts) if self.drafter is not None else {SHALLOW: {1: 0.0}},
            switch_s=max(median(self.switches), 0.0) if self.switches else 0.0,
            inject_s=max(median(self.injections), 0.0) if self.injections else 0.0,
            token_share=self._token_share(),
            trees=self.trees,
            spread=0.0 if self.is_rough else self._spread(),
            budget_s=self.budget_s,
        )

    def _measure(self, times: tuple[int, ...]) -> None:
        """Passes and drafts at the present depth, in turn, so that a disturbance of one disturbs
        all; each so many times."""
        for timed in times:
            for n_rows in self._rows(self.widths):
                self._step(n_rows, timed)
            if self.drafter is not None:
                for n_seqs in sorted({1, self.n_seq}):
                    self._draft(n_seqs, timed)
                if self.drafter.by_steps and self.n_draft > 1:
                    self._draft(1, timed, n_draft=1)
                self._inject()

    def _measure_deep(self) -> bool:
        """Those that matter most, after as many tokens as there is time for. False: for none."""
        # Room for a pass of all rows after it, and for a draft of many.
        room = self.target.n_ctx_all // self.n_seq - max(*self.widths, _MANY_ROWS)
        shallow, times = self.depth, self.steps[self.depth]
        pass_s = median(times[max(times)])
        row_s = pass_s / max(times)  # a prompt's rows cost less, as the first fill will show
        n_passes = _N_DEEP * (self.warm_up + _TIMED)
        for deep in DEEP:
            part = min(deep // self.n_seq, room)
            n_rows = self.n_seq * part
            n_chunks = math.ceil(n_rows / self.target.n_batch)
            # With fewer tokens more, what they cost would be lost in the noise.
            is_deep = self.n_seq * (part - self.part) >= _MANY_ROWS
            seconds = n_rows * row_s + n_passes * pass_s
            if not is_deep or not self._affords(n_chunks + n_passes, seconds):
                break
            begin = time.perf_counter()
            self._fill(part)
            row_s = (time.perf_counter() - begin) / n_rows
        if self.depth == shallow:
            return False
        for n_rows in self._rows(self.widths[:_N_DEEP]):
            self._step(n_rows, _TIMED)
        if self.drafter is not None:
            self._draft(1, _TIMED)
        self._tree()
        return True

    @property
    def n_plain(self) -> int:
        """The number of timings of a plain step."""
        return len(self.steps[self.n_seq * SHALLOW].get(self.n_seq, ()))

    @property
    def depth(self) -> int:
        return self.n_seq * self.part

    def _spread(self) -> float:
        """The usual spread of the times of one kind: their median over their minimum, less 1; the
        median of the kinds with several times, 0 without any."""
        depth = self.n_seq * SHALLOW
        times = [*self.steps[depth].values(), *self.drafts.get(depth, {}).values()]
        found = [median(each) / min(each) - 1 for each in times if len(each) > 1]
        return median(found) if found else 0.0

    def _rows(self, widths: list[int]) -> list[int]:
        """Row counts of a pass: of all sequences together, and of one alone."""
        return list(dict.fromkeys(n for width in widths for n in (width * self.n_seq, width)))

    # Timing

    def _affords(self, n_steps: int, seconds: float) -> bool:
        in_time = time.perf_counter() + seconds <= self.end_s
        return in_time and self.n_steps + n_steps <= BUDGET_STEPS

    def _timed(
        self, run: Callable[[], float], n: int, guess_s: float, *, needed: bool = False
    ) -> list[float]:
        """Seconds of n runs after those that make graphs; none if there is no time for them."""
        n += self.warm_up
        if not needed and not self._affords(n, n * guess_s):
            return []
        seconds = [run() for _ in range(n)]
        self.n_steps += n
        first, rest = seconds[: self.warm_up], seconds[self.warm_up :]
        self.made_s = sum(first) - self.warm_up * median(rest)
        return rest

    def _step(self, n_rows: int, timed: int, *, needed: bool = False) -> None:
        """Time passes of `n_rows` rows at the present depth."""
        known = self.steps.setdefault(self.depth, {})
        seconds = self._timed(lambda: self._pass(n_rows), timed, self._guess(n_rows), needed=needed)
        if seconds:
            known.setdefault(n_rows, []).extend(seconds)
        if len(seconds) > 1:
            self.switches.append(self.made_s)

    def _tree(self) -> None:
        """Time passes over a tree of one sequence beside those over a chain of as many rows: a
        path, and a leaf beside each of its nodes."""
        # A batch has room for as many rows as a sequence has branches.
        if min(self.target.options.n_branches, self.target.n_ctx_all - self.depth) < _TREE_ROWS:
            return
        path = list(range(-1, _TREE_ROWS // 2 - 1))
        tree = [*path, *path[: _TREE_ROWS - 1 - len(path)]]
        guess_s = self._guess(_TREE_ROWS)
        chain = self._timed(self._verified_s, 2 * _TIMED, 2 * guess_s)
        if chain:
            seconds = self._timed(lambda: self._verified_s(tree), 2 * _TIMED, guess_s, needed=True)
            self.trees[self.depth] = max(median(seconds) - median(chain), 0.0)

    def _draft(
        self, n_seqs: int, timed: int, features: Features | None = None, n_draft: int = 0
    ) -> None:
        """Time the draft stage for the first `n_seqs` sequences: of one token, or 0, of all."""
        known = self.drafts.setdefault(self.depth, {})
        if features is None:
            usual = median(next(iter(self.drafts.values()))[1]) * n_seqs
            if not self._affords(1, (self.warm_up + timed) * usual + self._guess(SHALLOW)):
                return
            features = self._new_features(min(SHALLOW, self.target.n_batch))
        seconds = self._timed(
            lambda: self._draft_stage_s(n_seqs, features, n_draft), timed, 0.0, needed=True
        )
        (self.firsts if n_draft else known.setdefault(n_seqs, [])).extend(seconds)

    def _token_share(self) -> float:
        """See `Costs`; on a line from a draft of one token to the longest."""
        if not self.firsts:
            return 0.0
        whole = median(self.drafts[self.n_seq * SHALLOW][1])
        return max(1 - median(self.firsts) / whole, 0.0) / (self.n_draft - 1)

    def _inject(self) -> None:
        """Time a draft that has many rows to inject first."""
        usual = median(self.drafts[self.depth][1])
        room = self.target.n_ctx_all // self.n_seq - self.part
        n_rows = min(_MANY_ROWS, self.target.n_batch, room)
        guess_s = (self.warm_up + 1) * usual + 2 * self._guess(n_rows)
        if n_rows > 2 * SHALLOW and self._affords(1, guess_s):
            features = self._new_features(n_rows)
            (seconds,) = self._timed(lambda: self._draft_stage_s(1, features), 1, 0.0, needed=True)
            self.injections.append((seconds - usual) / (n_rows - SHALLOW))

    def _guess(self, n_rows: int) -> float:
        """Seconds of a pass, if need be from the nearest narrower one timed, by the row."""
        known = self.steps.get(self.depth, {})
        near = max((n for n in known if n <= n_rows), default=0)
        return min(known[near]) * n_rows / near if near else 0.0

    # Passes and drafts, each undone

    def _fill(self, part: int) -> Features | None:
        """Both caches to `part` tokens of each sequence; returns the features that the first
        injected last, None without a drafter."""
        self.empty()
        chunk = self.target.n_batch // self.n_seq
        for begin in range(0, part, chunk):
            self.part = begin
            n = min(chunk, part - begin)
            self._decode(n * self.n_seq, output=False)
            if self.drafter is not None:
                for seq in range(self.n_seq):
                    rows = range(seq * n, (seq + 1) * n)
                    self.drafter.inject(seq, self._features(rows))
        is_read = self.drafter is not None and self.target.n_features
        if is_read and not np.isfinite(self.target.hidden_states([0])).all():
            raise not_finite()  # or the drafter would be blamed for what it makes of them
        self.part = part
        self.starts = [self.target.checkpoint(seq, part) for seq in range(self.n_seq)]
        return self._features(range(n)) if self.drafter is not None else None

    def empty(self) -> None:
        for seq in range(self.n_seq):
            self.target.clear(seq)
            if self.drafter is not None:
                self.drafter.truncate(seq, 0)

    def _decode(self, n_rows: int, *, output: bool = True) -> float:
        """Seconds of a pass of random rows, dealt to the sequences as evenly as they go."""
        n_seqs = math.gcd(n_rows, self.n_seq) if self.target.needs_equal_rows else self.n_seq
        seq_ids = sorted(i % n_seqs for i in range(n_rows))
        positions = [self.part + i - seq_ids.index(seq) for i, seq in enumerate(seq_ids)]
        self.tokens = tokens = self._random(n_rows)
        begin = time.perf_counter()
        self.target.decode(tokens, positions, seq_ids, [output] * n_rows)
        return time.perf_counter() - begin

    def _pass(self, n_rows: int) -> float:
        seconds = self._decode(n_rows)
        self._undo()
        return seconds

    def _verified_s(self, parents: list[int] | None = None) -> float:
        """Seconds of a pass over random drafts of the first sequence: a chain without `parents`."""
        anchor, *tokens = self._random(_TREE_ROWS)
        batch = Batch()
        if parents is None:
            batch.add(0, self.part, [anchor, *tokens])
        else:
            batch.add_tree(0, self.part, anchor, tokens, parents)
        begin = time.perf_counter()
        self.target.run(batch)
        seconds = time.perf_counter() - begin
        self.target.keep(batch.parts[0], [0])
        self._undo()
        return seconds

    def _random(self, n: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.target.n_vocab, n).tolist()
        return tokens

    def _undo(self) -> None:
        for seq, start in enumerate(self.starts):
            if not self.target.truncate(seq, start.length):
                self.target.restore(seq, start)

    def _new_features(self, n_rows: int) -> Features:
        self._decode(n_rows, output=False)
        self._undo()
        return self._features(range(n_rows))

    def _features(self, rows: range) -> Features:
        """Context features of these rows of the last pass, as the engine hands them over."""
        numbers = [self.target.numbers[row] for row in rows]
        return StoredFeatures(self.target, numbers, [self.tokens[row] for row in rows])

    def _draft_stage_s(self, n_seqs: int, features: Features, n_draft: int = 0) -> float:
        """Seconds of one draft stage that injects `features` in each sequence; 0: of all tokens."""
        drafter = self.drafter
        assert drafter is not None
        n_draft = n_draft or self.n_draft
        requests = [DraftRequest(seq, 1, features, n_draft, whole=True) for seq in range(n_seqs)]
        begin = time.perf_counter()
        drafter.draft(requests)
        seconds = time.perf_counter() - begin
        for seq in range(n_seqs):
            drafter.truncate(seq, self.part)
        return seconds


def _usual(times: dict[int, dict[int, list[float]]]) -> dict[int, dict[int, float]]:
    """The lower quartile of each, as other work of the machine only ever adds time; and fewer rows
    cost at most so much more than any greater number of them, whatever was measured."""
    usual: dict[int, dict[int, float]] = {}
    for depth, row in times.items():
        least = math.inf
        for n in sorted(row, reverse=True):
            seconds = min(sorted(row[n])[len(row[n]) // 4], _DEAREST * least)
            usual.setdefault(depth, {})[n] = seconds
            least = min(least, seconds)
    return {depth: dict(sorted(row.items())) for depth, row in usual.items()}
