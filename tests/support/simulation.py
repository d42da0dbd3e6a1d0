"""A machine and a text in numbers, to play rounds on: what a controller would make of them.

Seconds come from a table of the machine, acceptance from a random process. The controller sees
noisy times (some of them hiccups) and random outcomes. What it is judged by is the noise-free time,
with every change of row count, every draft and every injected row in it, and the tokens that the
widths it chose give on average: a quarter of the rounds then tells as much.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_local.bench.replay.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.engine.round import MOST_WITH_A_DRAFT
from dflash_local.pays.controller import Controller, Policy
from dflash_local.pays.costs import Costs

BLOCK = 16
CALIBRATED = (1, 2, 3, 4, 6, 8, 9, 12, 16)
DEPTH = 500
JITTER = 0.04
"""Of the times that a controller sees: the standard deviation of their logarithms."""
ON_THE_WAY = (0.35, 0.65)
"""Of the cost of new graphs, by the passes with them: a GPU records with the second what llama.cpp
has built with the first."""


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step by rows, on straight lines between; of one draft and each sequence
    more, of a change of row count, of an injected row, and of the host with and without drafts."""

    name: str
    steps: dict[int, float]
    draft: float
    draft_more: float
    switch: float
    inject: float
    host: float = 0.1
    draft_host: float = 0.15

    def step(self, rows: int) -> float:
        known = sorted(self.steps)
        i = min(max(bisect_left(known, rows), 1), len(known) - 1)
        few, many = known[i - 1], known[i]
        part = (rows - few) / (many - few)
        return self.steps[few] + part * (self.steps[many] - self.steps[few])

    def drafts(self, n_seqs: int) -> float:
        return self.draft + self.draft_more * (n_seqs - 1) if n_seqs else 0.0

    def costs(self, n_seqs: int, noise: float = 0.02, *, less: float = 0.0, seed: int = 0) -> Costs:
        """As a calibration would find them: some row counts only, and each a little wrong. Passes
        after drafts take `less` milliseconds less than they will."""
        rng = random.Random(n_seqs + seed)
        rows = sorted(set(CALIBRATED) | {n * n_seqs for n in CALIBRATED})
        return Costs(
            {
                DEPTH: {
                    n: 1e-3 * (self.step(n) - less * (n > n_seqs)) * _noise(rng, noise)
                    for n in rows
                }
            },
            {DEPTH: {n: 1e-3 * self.drafts(n) * _noise(rng, noise) for n in {1, n_seqs}}},
            switch_s=1e-3 * self.switch,
            host_s=1e-3 * self.host,
            draft_host_s=1e-3 * self.draft_host,
            inject_s=1e-3 * self.inject,
        )


MACHINES = {
    machine.name: machine
    for machine in (
        # A model of Qwen3-8B's shape on an H200, as measured.
        Machine(
            "h200-q4_k_m",
            {1: 3.83, 2: 4.35, 4: 5.73, 8: 8.52, 9: 7.92, 16: 8.33, 24: 9.15, 32: 10.16, 64: 13.6,
             128: 19.0},
            draft=2.0, draft_more=0.1, switch=5.9, inject=0.002,
        ),
        Machine(
            "h200-q8_0",
            {1: 4.21, 2: 4.6, 4: 5.7, 8: 7.80, 16: 8.65, 32: 10.4, 64: 13.6, 128: 19.0},
            draft=2.0, draft_more=0.1, switch=5.9, inject=0.002,
        ),
        Machine(  # 32 rows are cheaper than 16
            "h200-bf16",
            {1: 4.97, 2: 5.3, 4: 6.2, 8: 7.92, 16: 8.64, 17: 7.2, 32: 7.41, 64: 8.43, 128: 12.0},
            draft=2.0, draft_more=0.1, switch=5.9, inject=0.002,
        ),
        Machine(
            "rtx-4090",
            {1: 7.0, 2: 7.3, 4: 8.0, 8: 10.5, 9: 12.0, 16: 13.0, 32: 17.0, 64: 28.0, 128: 52.0},
            draft=1.6, draft_more=0.2, switch=2.0, inject=0.003,
        ),
        Machine(
            "laptop",
            {1: 22.0, 2: 24.0, 4: 30.0, 8: 48.0, 9: 50.0, 16: 62.0, 32: 110.0, 64: 210.0,
             128: 410.0},
            draft=6.0, draft_more=2.0, switch=4.0, inject=0.05,
        ),
        Machine(  # compute bound: a check of two tokens costs 2.7 steps
            "cpu-tiny",
            {1: 1.15, 2: 3.1, 4: 5.2, 8: 7.4, 16: 9.6, 32: 18.0, 64: 35.0, 128: 69.0},
            draft=4.5, draft_more=3.5, switch=0.1, inject=0.08,
        ),
        Machine(
            "cpu-8b",
            {1: 180.0, 2: 190.0, 4: 260.0, 8: 480.0, 16: 900.0, 32: 1750.0, 64: 3500.0,
             128: 7000.0},
            draft=110.0, draft_more=80.0, switch=1.0, inject=1.0,
        ),
        Machine(
            "moe",
            {1: 4.0, 2: 5.6, 4: 8.0, 8: 11.5, 16: 15.0, 32: 18.0, 64: 21.0, 128: 25.0},
            draft=2.0, draft_more=0.1, switch=3.0, inject=0.002,
        ),
        Machine(  # a draft costs as much as a step
            "tiny-gpu",
            {1: 0.35, 2: 0.40, 4: 0.44, 8: 0.55, 9: 0.62, 16: 0.75, 32: 1.0, 64: 1.5, 128: 2.6},
            draft=0.35, draft_more=0.05, switch=0.8, inject=0.001, host=0.05, draft_host=0.06,
        ),
        Machine(  # a new graph costs two steps: the shipped pair as measured on an H200
            "tiny-h200",
            {1: 0.32, 2: 0.37, 4: 0.41, 8: 0.46, 9: 0.95, 16: 1.02, 32: 1.23, 64: 1.47, 128: 2.4},
            draft=0.30, draft_more=0.035, switch=1.5, inject=0.001, host=0.01, draft_host=0.05,
        ),
    )
}  # fmt: skip


Drafts = tuple[list[float], list[float]]
"""The drafter's log-probabilities, and the true chance of each draft given those before."""

Text = Callable[[random.Random, float], Drafts]
"""A draft at a place of an answer, 0 to 1."""


def confident(start: float, fall: float, spread: float, over: float = 0.0) -> Text:
    """Drafts of varying difficulty whose log-probabilities tell it: logits of the drafter's own
    probability begin at `start`, fall along the block, and promise `over` too much."""

    def draft(rng: random.Random, _place: float) -> Drafts:
        logprobs, chances = [], []
        block = rng.gauss(start, spread)
        for j in range(BLOCK - 1):
            logit = block - fall * j + rng.gauss(0.0, 1.5)
            logprobs.append(-math.log1p(math.exp(-logit)))
            chances.append(1.0 / (1.0 + math.exp(over - logit)))
        return logprobs, chances

    return draft


def geometric(chance: float, kind: str) -> Text:
    """Every draft survives with the same chance, and log-probabilities say nothing of it: random
    ones, those of random weights, or zeros."""

    def draft(rng: random.Random, _place: float) -> Drafts:
        n = BLOCK - 1
        if kind == "random":
            logprobs = [-rng.uniform(0.0, 5.0) for _ in range(n)]
        elif kind == "untrained":
            logprobs = [-8.0 - rng.random() for _ in range(n)]
        else:
            logprobs = [0.0] * n
        return logprobs, [chance] * n

    return draft


def switching(first: Text, second: Text) -> Text:
    """Quarters of an answer in turn."""

    def draft(rng: random.Random, place: float) -> Drafts:
        return (second if int(place * 4) % 2 else first)(rng, place)

    return draft


CODE = confident(3.2, 0.1, 1.2)
PROSE = confident(0.0, 0.15, 0.8)
TEXTS: dict[str, Text] = {
    "code": CODE,
    "prose": PROSE,
    "hopeless": confident(-2.0, 0.1, 0.5),
    "switching": switching(CODE, PROSE),
    "geometric 0.85": geometric(0.85, "random"),
    "geometric 0.85 untrained": geometric(0.85, "untrained"),
    "geometric 0.6 certain": geometric(0.6, "zeros"),
    "geometric 0.3": geometric(0.3, "random"),
    "over-confident": confident(2.5, 0.1, 1.0, over=3.0),
}


class RecordedText:
    """Drafts of the shipped pair as they were recorded, through passages drawn so that whole chains
    give rounds of `length` tokens; in one answer of `n_tokens` after the other."""

    def __init__(self, length: float, n_tokens: int, seed: int) -> None:
        self._known = RecordedDrafts.shipped()
        self._weights = self._known.weights(length)
        self._rng = np.random.default_rng(seed)
        self._n_tokens = n_tokens
        self._last = n_tokens
        self._passage = self._at = 0

    def __call__(self, _rng: random.Random, place: float) -> Drafts:
        done = round(place * self._n_tokens)
        if done < self._last:
            self._at, self._last = self._known.n_tokens, 0
        self._at += done - self._last
        self._last = done
        if self._at >= self._known.n_tokens:
            self._at %= self._known.n_tokens
            self._passage = int(self._rng.choice(self._known.n_passages, p=self._weights))
        kept = int(self._known.kept[self._passage, self._at])
        logprobs: list[float] = self._known.logprobs[self._passage, self._at, :, 0].tolist()
        return logprobs, [1.0] * kept + [0.0] * (BLOCK - 1 - kept)


class Fixed(Controller):
    """One width for all, the whole time."""

    def __init__(self, costs: Costs, width: int) -> None:
        super().__init__(costs, BLOCK)
        self.width = width

    def n_drafts(
        self, policies: Sequence[Policy], limits: Sequence[int], other_rows: int = 0
    ) -> list[int]:
        return [BLOCK - 1 if self.width > 1 and limit > 0 else 0 for limit in limits]

    def chances(
        self,
        policies: Sequence[Policy],
        drafts: Sequence[Draft],
        limits: Sequence[int],
    ) -> list[list[float]]:
        return [[1.0] * limit for limit in limits]

    def rows(self, chains: Sequence[list[float]], **_: object) -> list[int]:
        return [min(self.width, 1 + len(chain)) for chain in chains]

    def observe(self, *_: object) -> None:
        """Learns nothing."""

    def observe_round(self, *_: object, **__: object) -> None:
        """Learns nothing."""


@dataclass
class Played:
    """What came of it: expected tokens, true seconds, and the drafting of each round."""

    tokens: float = 0.0
    seconds: float = 0.0
    drafted: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    policies: list[Policy] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def engaged_after(self) -> int | None:
        """Rounds until four in a row drafted; None: never."""
        for i in range(len(self.drafted) - 3):
            if all(self.drafted[i : i + 4]):
                return i
        return None

    def switches(self) -> int:
        return sum(a != b for a, b in zip(self.rows, self.rows[1:], strict=False))


def chain(logprobs: Sequence[float]) -> Draft:
    """A draft of tokens 0."""
    ids = np.zeros((len(logprobs), 1), np.int32)
    candidates = Candidates(ids, np.array(logprobs, np.float32)[:, None])
    return Draft.chain([0] * len(logprobs), logprobs, candidates)


def emitted(accepted: int, drafted: int) -> list[int]:
    """The tokens after a chain of `drafted` ones of which so many were accepted."""
    return [0] * accepted + [int(accepted < drafted)]


@dataclass
class _Answer:
    length: int
    policy: Policy
    done: int = 0
    pending: int = 0


def play(
    machine: Machine,
    text: Text,
    controller: Controller,
    lengths: Sequence[int],
    *,
    n_seqs: int = 1,
    seed: int = 0,
) -> Played:
    """Answers of these lengths, `n_seqs` at a time, a new one as soon as one has ended; ends when
    there are none to fill the batch."""
    rng, luck, jitter = (random.Random(3 * seed + i) for i in range(3))
    played = Played()
    waiting = list(lengths)

    def begin() -> _Answer:
        answer = _Answer(waiting.pop(0), controller.open(DEPTH))
        played.policies.append(answer.policy)
        return answer

    answers = [begin() for _ in range(n_seqs)]
    last_rows = made = 0
    while True:
        policies = [answer.policy for answer in answers]
        limits = [min(BLOCK - 1, answer.length - answer.done - 1) for answer in answers]
        n_drafts = controller.n_drafts(policies, limits)
        drafts: list[Drafts] = [
            text(rng, answer.done / answer.length) if n else ([], [])
            for answer, n in zip(answers, n_drafts, strict=True)
        ]
        n_drafting = sum(n > 0 for n in n_drafts)
        widths = [1] * n_seqs
        draft_ms = inject_ms = 0.0
        n_injected = 0
        if n_drafting:
            proposed = [chain(logprobs) for logprobs, _ in drafts]
            widths = controller.rows(controller.chances(policies, proposed, limits))
            backlogs = [a.pending for a, n in zip(answers, n_drafts, strict=True) if n]
            n_injected = sum(backlogs)
            inject_ms = machine.inject * sum(n for n in backlogs if n > MOST_WITH_A_DRAFT)
            draft_ms = machine.drafts(n_drafting) + machine.inject * n_injected - inject_ms
        rows = sum(widths)
        made = made + 1 if rows == last_rows else 0
        verify_ms = machine.step(rows) + machine.switch * (ON_THE_WAY[made] if made < 2 else 0.0)
        last_rows = rows
        played.seconds += 1e-3 * (inject_ms + draft_ms + verify_ms + machine.host)
        played.seconds += 1e-3 * (machine.draft_host if n_drafting else 0.0)
        played.drafted.append(n_drafting > 0)
        played.rows.append(rows)
        for answer, (logprobs, chances), width in zip(answers, drafts, widths, strict=True):
            assert 1 <= width <= 1 + len(chances), "more rows than drafts"
            right = 0  # whether they were verified or not
            while right < len(chances) and luck.random() < chances[right]:
                right += 1
            kept = min(right, width - 1)
            expected = survived = 1.0
            for chance in chances[: width - 1]:
                survived *= chance
                expected += survived
            played.tokens += expected
            answer.pending = 0 if chances else answer.pending + 1
            answer.done += 1 + kept
            if chances:
                controller.observe(
                    answer.policy,
                    chain(logprobs).clip(width - 1),
                    [0] * kept + [int(kept == right)],
                )
        noise = 1e-3 * _noise(jitter, JITTER)
        controller.observe_round(
            rows,
            "chain",
            n_drafting,
            DEPTH,
            draft_ms * noise,
            1e-3 * verify_ms * _noise(jitter, JITTER),
            n_injected=n_injected,
            inject_s=inject_ms * noise,
        )
        for i, answer in enumerate(answers):
            if answer.done >= answer.length:
                if not waiting:
                    return played
                answers[i] = begin()


def _noise(rng: random.Random, sigma: float) -> float:
    if rng.random() < 0.004:
        return rng.uniform(2.0, 8.0)  # the system was busy elsewhere
    return math.exp(rng.gauss(0.0, sigma))
