"""Measures what the parts of a round cost on this machine, in a few seconds, and keeps it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from dflash_local import disk_cache
from dflash_local.copies.chances import CopyPrior
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.errors import InputError
from dflash_local.pays.costs import SIZES, TO_MAKE, Costs
from dflash_local.pays.survival import Prior
from dflash_local.sampling.sampler import not_finite
from dflash_local.target.batch import Batch
from dflash_local.target.taps import Features, StoredFeatures
from dflash_local.target.target import StateCheckpoint, Target

SHALLOW = 4
"""Cached tokens of each sequence after which is measured: few, as a slow machine would take long to
fill a cache."""
DEEP = (1024, 8192)
"""The same in all, for what a cached token more costs: the last for which there is time. What trees
cost on top after 32k tokens cannot be told from the first."""
ENVIRONMENT = "DFLASH_LOCAL_CALIBRATION_S"
BUDGET_S = 3.0
"""Where that variable says nothing. What must be up at once, and draft whether it pays or not,
needs no more than a rough idea; `budget_s` has what holds."""
BUDGET_STEPS = 400
"""Without them, a tiny model would be measured for as long as a large one."""

_ROWS = SHALLOW  # that a usual round injects
_MANY_ROWS = max(SIZES)  # with fewer, their share of a draft is lost in its noise
_TIMED = 3  # with one, a single hiccup decides what a cached token is thought to cost
_N_DEEP = 6  # row counts after many tokens, few rows and many, for a line through them
_TREE_ROWS = 16  # of the usual tree
_FORMAT = 7
_DEAREST = 1.2  # at most so many times the seconds of a pass of more rows


def budget_s() -> float:
    """Seconds that a calibration may take: those of `DFLASH_LOCAL_CALIBRATION_S`, else `BUDGET_S`.

    Raises InputError for what is no such number.
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
    kept per machine, files, build and settings; `again` measures them though they are kept.

    Takes `budget_s()` seconds or `BUDGET_STEPS` target steps, whichever end first, but always wakes
    the model with a pass, and takes the time of two drafts, two plain steps and two of two rows.
    Times that differ too much, or too few to tell, are taken a second time. What is noisy even then
    (`Costs.noise`) is measured again at the next load, and what was measured with a smaller budget
    at this one. A budget below `BUDGET_S` asks for a rough idea, which is not judged.
    `before` empties all caches of target and drafter: called only if there is something to measure,
    and they are empty after it too. Raises as `budget_s` and `Target.decode`, and what the drafter
    raises.
    """
    if not again:
        with suppress(ValueError):  # not measured yet, or damaged
            kept = Costs.from_dict(_kept(target, drafter))
            if kept.noise is None and kept.budget_s >= budget_s():
                return kept
    trial = _Trial(target, drafter)
    before()
    try:
        costs = trial.run()
        if not trial.is_rough and (costs.noise or trial.n_plain < _TIMED):
            costs = trial.run()
    finally:
        trial.empty()
    key = _key(target, drafter)
    # What drafts and copies are worth is not measured here; `again` begins with nothing.
    known = None if again else disk_cache.read("costs", key)
    besides = known if isinstance(known, dict) else {}
    disk_cache.write("costs", key, besides | costs.as_dict())
    return costs


def known_copies(target: Target, drafter: Drafter | None) -> CopyPrior:
    """What earlier processes have learnt of this model's copies; else what is thought of any."""
    try:
        return CopyPrior.from_dict(_kept(target, drafter)["copies"])
    except (ValueError, LookupError, TypeError):
        return CopyPrior()


def known_priors(target: Target, drafter: Drafter, n_nodes: int) -> tuple[Prior, Prior]:
    """What earlier processes have learnt of this drafter's drafts, of greedy requests and of those
    that sample; else what is thought of any. `n_nodes` are the most of a tree."""
    size = min(drafter.block_size, target.max_width)
    try:
        greedy, sampled = _kept(target, drafter)["priors"]
        return Prior.from_dict(greedy, size, n_nodes), Prior.from_dict(sampled, size, n_nodes)
    except (ValueError, LookupError, TypeError):
        return Prior(size, n_nodes), Prior(size, n_nodes)


def keep(
    target: Target,
    drafter: Drafter | None,
    costs: Costs,
    priors: tuple[Prior, Prior] | None = None,
    copies: CopyPrior | None = None,
) -> None:
    """For the next process, which begins with what this one has learnt."""
    kept = costs.as_dict()
    if priors is not None:
        kept["priors"] = [prior.as_dict() for prior in priors]
    if copies is not None:
        kept["copies"] = copies.as_dict()
    disk_cache.write("costs", _key(target, drafter), kept)


class _Trial:
    """One calibration: passes and drafts on random tokens, timed within the budget."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        # As many sequences as there is room for, each with two rows.
        most = min(target.n_ctx // (SHALLOW + 2), target.n_batch)
        self.n_seq = min(target.options.n_seq, most)
        self.budget_s = budget_s()
        self.start = time.perf_counter()
        self.n_steps = 0
        self.part = 0  # cached tokens of each sequence
        self.starts: list[StateCheckpoint] = []  # of each sequence, when it had just these
        self.warm_up = 1 + TO_MAKE if target.options.n_gpu_layers else 1
        self.rng = np.random.default_rng(0)
        self.steps: dict[int, dict[int, list[float]]] = {}
        self.drafts: dict[int, dict[int, list[float]]] = {}
        self.switches: list[float] = []
        self.injections: list[float] = []
        self.trees: dict[int, float] = {}
        room = min(target.n_batch, target.n_ctx - SHALLOW * self.n_seq)
        most = min(room // self.n_seq, target.max_width)
        self.widths = [width for width in SIZES if width <= most]

    def run(self) -> Costs:
        """The costs by all times that were taken so far, those of an earlier run as well."""
        self.n_steps = 0
        features = self._fill(SHALLOW)
        self.start = time.perf_counter()
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
            trees=self.trees,
            spread=0.0 if self.is_rough else self._spread(),
            budget_s=self.budget_s,
        )

    def _measure(self, times: tuple[int, ...]) -> None:
        """Passes and drafts at the present depth, in turn, so that what disturbs one disturbs all;
        each so many times."""
        for timed in times:
            for n_rows in self._rows(self.widths):
                self._step(n_rows, timed)
            if self.drafter is not None:
                for n_seqs in sorted({1, self.n_seq}):
                    self._draft(n_seqs, timed)
                self._inject()

    def _measure_deep(self) -> bool:
        """Those that matter most, after as many tokens as there is time for. False: for none."""
        # Room for a pass of all rows after it, and for a draft of many.
        room = self.target.n_ctx // self.n_seq - max(*self.widths, _MANY_ROWS)
        shallow = self.depth
        widest = max(self.steps[shallow])
        pass_s = median(self.steps[shallow][widest])
        row_s = pass_s / widest  # a prompt's rows cost less, as the first fill will show
        n_passes = _N_DEEP * (self.warm_up + _TIMED)
        for deep in DEEP:
            part = min(deep // self.n_seq, room)
            n_rows = self.n_seq * part
            n_chunks = math.ceil(n_rows / self.target.n_batch)
            seconds = n_rows * row_s + n_passes * pass_s
            # With fewer tokens more, what they cost would be lost in the noise.
            is_deep = self.n_seq * (part - self.part) >= _MANY_ROWS
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
    def is_rough(self) -> bool:
        """Whether a rough idea of the costs was asked for."""
        return self.budget_s < BUDGET_S

    @property
    def n_plain(self) -> int:
        """How many times of a plain step there are."""
        return len(self.steps[self.n_seq * SHALLOW].get(self.n_seq, ()))

    def _spread(self) -> float:
        """How far the median of the times of one kind is above the shortest, as a part of that: of
        the usual kind, among those with several times; 0 if there is none."""
        depth = self.n_seq * SHALLOW
        times = [*self.steps[depth].values(), *self.drafts.get(depth, {}).values()]
        found = [median(each) / min(each) - 1 for each in times if len(each) > 1]
        return median(found) if found else 0.0

    def empty(self) -> None:
        for seq in range(self.n_seq):
            self.target.clear(seq)
            if self.drafter is not None:
                self.drafter.truncate(seq, 0)

    @property
    def depth(self) -> int:
        return self.n_seq * self.part

    def _rows(self, widths: list[int]) -> list[int]:
        """Row counts of a pass: of all sequences together, and of one alone."""
        together = [width * self.n_seq for width in widths]
        return list(dict.fromkeys(n for pair in zip(together, widths, strict=True) for n in pair))

    def _affords(self, n_steps: int, seconds: float) -> bool:
        spent = time.perf_counter() - self.start
        return self.n_steps + n_steps <= BUDGET_STEPS and spent + seconds <= self.budget_s

    def _fill(self, part: int) -> Features | None:
        """Both caches to `part` tokens of each sequence; returns what the first injected last, None
        without a drafter."""
        self.empty()
        chunk = self.target.n_batch // self.n_seq
        for begin in range(0, part, chunk):
            self.part = begin
            n = min(chunk, part - begin)
            self._pass(n * self.n_seq, output=False)
            if self.drafter is not None:
                for seq in range(self.n_seq):
                    rows = range(seq * n, (seq + 1) * n)
                    self.drafter.inject(seq, _features(self.target, rows))
        if self.drafter is not None and not np.isfinite(self.target.hidden_states([0])).all():
            raise not_finite()  # or the drafter would be blamed for what it makes of them
        self.part = part
        self.starts = [self.target.checkpoint(seq, part) for seq in range(self.n_seq)]
        return _features(self.target, range(n)) if self.drafter is not None else None

    def _pass(self, n_rows: int, *, output: bool = True) -> float:
        """Seconds of a pass of random rows, dealt to the sequences as evenly as they go."""
        n_seqs = math.gcd(n_rows, self.n_seq) if self.target.needs_equal_rows else self.n_seq
        seq_ids = sorted(i % n_seqs for i in range(n_rows))
        positions = [self.part + i - seq_ids.index(seq) for i, seq in enumerate(seq_ids)]
        tokens = self.rng.integers(0, self.target.n_vocab, n_rows, dtype=np.int32)
        begin = time.perf_counter()
        self.target.decode(tokens, positions, seq_ids, [output] * n_rows)
        self.n_steps += 1
        return time.perf_counter() - begin

    def _step(self, n_rows: int, timed: int, *, needed: bool = False) -> None:
        """Time passes of `n_rows` rows at the present depth; the first one apart."""
        known = self.steps.setdefault(self.depth, {})
        n = self.warm_up + timed
        if not needed and not self._affords(n, n * self._guess(n_rows)):
            return
        seconds = []
        for _ in range(n):
            seconds.append(self._pass(n_rows))
            self._undo()
        known.setdefault(n_rows, []).extend(seconds[self.warm_up :])
        if timed > 1:
            usual = median(seconds[self.warm_up :])
            self.switches.append(sum(seconds[: self.warm_up]) - self.warm_up * usual)

    def _tree(self) -> None:
        """Time passes over a tree of one sequence beside those over a chain of as many rows."""
        n_rows = _TREE_ROWS
        n = 2 * (self.warm_up + 2 * _TIMED)
        # A batch has room for as many rows as a sequence has branches.
        room = min(self.target.options.n_branches, self.target.n_ctx - self.depth)
        is_possible = n_rows <= room
        if not is_possible or not self._affords(n, n * self._guess(n_rows)):
            return
        usual = []
        for drafted in (self._chain_s, self._tree_pass_s):
            seconds = [drafted(n_rows) for _ in range(n // 2)]
            usual.append(median(seconds[self.warm_up :]))
        self.trees[self.depth] = max(usual[1] - usual[0], 0.0)

    def _chain_s(self, n_rows: int) -> float:
        """Seconds of a pass over a chain of random tokens of the first sequence; then undone."""
        batch = Batch()
        batch.add(0, self.part, self._random(n_rows))
        return self._undone(batch)

    def _tree_pass_s(self, n_rows: int) -> float:
        """The same over a tree: a path, and a leaf beside each of its nodes."""
        anchor, *tokens = self._random(n_rows)
        path = list(range(-1, n_rows // 2 - 1))
        batch = Batch()
        batch.add_tree(0, self.part, anchor, tokens, [*path, *path[: n_rows - 1 - len(path)]])
        return self._undone(batch)

    def _random(self, n: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.target.n_vocab, n).tolist()
        return tokens

    def _undone(self, batch: Batch) -> float:
        begin = time.perf_counter()
        self.target.run(batch)
        seconds = time.perf_counter() - begin
        self.target.keep(batch.parts[0], [0])
        self._undo()
        self.n_steps += 1
        return seconds

    def _undo(self) -> None:
        for seq, start in enumerate(self.starts):
            if not self.target.truncate(seq, start.length):
                self.target.restore(seq, start)

    def _guess(self, n_rows: int) -> float:
        """Seconds of a pass, if need be from the nearest narrower one timed, by the row."""
        known = self.steps[self.depth]
        near = max((n for n in known if n <= n_rows), default=0)
        return min(known[near]) * n_rows / near if near else 0.0

    def _draft(self, n_seqs: int, timed: int, features: Features | None = None) -> None:
        """Time the draft stage for the first `n_seqs` sequences; the first one apart."""
        known = self.drafts.setdefault(self.depth, {})
        if features is None:
            usual = median(next(iter(self.drafts.values()))[1]) * n_seqs
            if not self._affords(1, (self.warm_up + timed) * usual + self._guess(_ROWS)):
                return
            features = self._new_features(_ROWS)
        seconds = [self._one_draft(n_seqs, features) for _ in range(self.warm_up + timed)]
        known.setdefault(n_seqs, []).extend(seconds[self.warm_up :])

    def _inject(self) -> None:
        """Time a draft that has many rows to inject first."""
        usual = median(self.drafts[self.depth][1])
        n_rows = min(_MANY_ROWS, self.target.n_batch, self.target.n_ctx // self.n_seq - self.part)
        if n_rows <= 2 * _ROWS or not self._affords(
            1, (self.warm_up + 1) * usual + 2 * self._guess(n_rows)
        ):
            return
        features = self._new_features(n_rows)
        for _ in range(self.warm_up):
            self._one_draft(1, features)
        seconds = self._one_draft(1, features)
        self.injections.append((seconds - usual) / (n_rows - _ROWS))

    def _new_features(self, n_rows: int) -> Features:
        self._pass(n_rows, output=False)
        self._undo()
        return _features(self.target, range(n_rows))

    def _one_draft(self, n_seqs: int, features: Features) -> float:
        """Seconds of one draft stage that injects `features` in each sequence; then undone."""
        drafter = self.drafter
        assert drafter is not None
        n_draft = drafter.block_size - 1
        requests = [DraftRequest(seq, 1, features, n_draft) for seq in range(n_seqs)]
        begin = time.perf_counter()
        drafter.draft(requests)
        seconds = time.perf_counter() - begin
        for seq in range(n_seqs):
            drafter.truncate(seq, self.part)
        return seconds


def _features(target: Target, rows: range) -> Features:
    """Context features of these rows of the last pass, as the engine hands them over."""
    return StoredFeatures(target, [target.numbers[row] for row in rows])


def _usual(times: dict[int, dict[int, list[float]]]) -> dict[int, dict[int, float]]:
    """The lower quartile of each, as what else the machine does only ever adds time; and fewer
    rows cost at most so much more than any greater number of them, whatever was measured."""
    usual: dict[int, dict[int, float]] = {}
    for depth, row in times.items():
        least = math.inf
        for n in sorted(row, reverse=True):
            seconds = min(sorted(row[n])[len(row[n]) // 4], _DEAREST * least)
            usual.setdefault(depth, {})[n] = seconds
            least = min(least, seconds)
    return {depth: dict(sorted(row.items())) for depth, row in usual.items()}


def _kept(target: Target, drafter: Drafter | None) -> Any:
    """What was measured and learnt, with as much context or more; None if there is nothing."""
    own = _key(target, drafter)
    kept = None
    for deep in range(own["options"]["n_ctx"], len(DEEP) + 1):
        kept = disk_cache.read("costs", own | {"options": own["options"] | {"n_ctx": deep}})
        if kept is not None:
            break
    return kept


def _key(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    options = asdict(target.options)
    # Costs follow what is cached, not what could be: it counts how deep they could be measured.
    options["n_ctx"] = sum(target.n_ctx >= deep for deep in DEEP)
    del options["exact"]  # costs are measured with all threads
    return {
        "format": _FORMAT,
        "machine": target.machine(),
        "threads": target.n_threads,
        "target": target.file_key,
        "drafter": [drafter.file_key, type(drafter).__name__] if drafter else None,
        "window": drafter.draft_window if drafter else 0,
        "options": options,
    }
