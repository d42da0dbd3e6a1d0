"""One measured request, and what many of them say together: medians, spread, time per stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dflash_local.draft.shape import DraftShape
from dflash_local.stats import Stats

if TYPE_CHECKING:
    from dflash_local.model import Model
    from dflash_local.target.target import Target

Width = int | Literal["auto"]
"""Target rows per verify pass; "auto" leaves it to the model, 0 is plain decoding."""


@dataclass(frozen=True)
class Way:
    """How to decode: rows of a verify pass, and the shape of the drafts that are in them."""

    width: Width = "auto"
    shape: DraftShape = "chain"

    def __str__(self) -> str:
        if self == PLAIN:
            return "plain"
        return "auto" if self.shape == "auto" else f"{self.shape} {self.width}"

    def as_dict(self) -> dict[str, Any]:
        return {"width": self.width, "shape": self.shape}


PLAIN = Way(0)

_LEAST_TOKENS = 8
"""Answers with fewer decoded tokens say more about the clock than about the model."""


@dataclass(frozen=True)
class Answer:
    """A request's tokens and costs. `ttft_s` is what the caller waited for the first token."""

    tokens: list[int]
    stats: Stats
    ttft_s: float

    @property
    def n_decoded(self) -> int:
        """Tokens of the rounds: all but the one that the prompt's last row gave."""
        return sum(length * rounds for length, rounds in self.stats.accepted_lengths.items())

    @property
    def counts(self) -> bool:
        """Whether it is long enough for its speed to mean something."""
        return self.n_decoded >= _LEAST_TOKENS


def ask(
    model: Model,
    tokens: Sequence[int],
    way: Way,
    *,
    temperature: float,
    seed: int,
    max_tokens: int,
) -> Answer:
    """One request, as a user's would come. Raises what `Model.stream` raises."""
    start = time.perf_counter()
    ttft_s, result = 0.0, None
    for chunk in model.stream(
        list(tokens),
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        draft_width=way.width,
        draft_shape=way.shape,
    ):
        if chunk.tokens and not ttft_s:
            ttft_s = time.perf_counter() - start
        result = chunk.result
    assert result is not None, "only a closed model ends a stream without its result"
    return Answer(result.tokens, result.stats, ttft_s)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `n` values; the least and the largest where there are only a few."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None of no values."""
        found = np.fromiter(values, np.float64)
        if not found.size:
            return None
        low, high = (25, 75) if found.size >= 4 else (0, 100)
        return cls(
            float(np.median(found)),
            float(np.percentile(found, low)),
            float(np.percentile(found, high)),
            int(found.size),
        )

    def as_dict(self) -> dict[str, float]:
        """Four significant digits are more than any clock deserves; six are kept."""
        return {
            "median": significant(self.median),
            "low": significant(self.low),
            "high": significant(self.high),
            "n": self.n,
        }


CURVE_DEPTH = 256
"""Tokens of context in which the cost of a pass is measured."""

STAGES = ("draft", "verify", "sample", "host")


@dataclass(frozen=True)
class Speed:
    """What answers of one kind cost. `overall` are tokens/s of all of them together; `stage_s` mean
    seconds per round, by `STAGES`."""

    tokens_per_second: Spread | None
    overall: float | None
    ttft_s: Spread | None
    stage_s: dict[str, float]
    n_answers: int
    n_tokens: int
    n_too_short: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Speed:
        counted = [answer.stats for answer in answers if answer.counts]
        rounds = sum(stats.rounds for stats in counted)
        spent = {
            "draft": sum(stats.draft_s for stats in counted),
            "verify": sum(stats.verify_s for stats in counted),
            "sample": sum(stats.sample_s for stats in counted),
            "host": sum(stats.rest_s for stats in counted),
        }
        return cls(
            tokens_per_second=Spread.of(stats.tokens_per_second for stats in counted),
            overall=_overall([answer for answer in answers if answer.counts]),
            ttft_s=Spread.of(answer.ttft_s for answer in answers),
            stage_s={name: seconds / rounds for name, seconds in spent.items()} if rounds else {},
            n_answers=len(answers),
            n_tokens=sum(len(answer.tokens) for answer in answers),
            n_too_short=len(answers) - len(counted),
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_second": _spread(self.tokens_per_second),
            "overall_tokens_per_second": _rounded(self.overall),
            "ttft_s": _spread(self.ttft_s),
            "stage_s": {name: significant(value) for name, value in self.stage_s.items()},
            "n_answers": self.n_answers,
            "n_tokens": self.n_tokens,
            "n_too_short": self.n_too_short,
        }


@dataclass(frozen=True)
class Acceptance:
    """What became of drafts, in the rounds that had any; `plain_rounds` are the others.

    `lengths`: rounds by tokens emitted. `drafted` and `accepted`: how often the draft at position
    1, 2, ... was verified and kept. `widths`: rounds by verified rows. Of `tree_rounds`, whose
    draft was a tree, `leaves` are all branches, and `side_rounds` those in which another branch
    than the drafter's best was kept.
    """

    lengths: dict[int, int] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)
    plain_rounds: int = 0
    graph_rebuilds: int = 0
    tree_rounds: int = 0
    leaves: int = 0
    side_rounds: int = 0

    @classmethod
    def of(cls, found: Iterable[Stats]) -> Acceptance:
        return cls.sum(cls._of_one(stats) for stats in found)

    @classmethod
    def _of_one(cls, stats: Stats) -> Acceptance:
        widths = stats.widths
        # A round without drafts always emits one token, which says nothing about drafts.
        plain = sum(n for width, n in widths.items() if width <= 1)
        lengths = dict(stats.accepted_lengths)
        lengths[1] = lengths.get(1, 0) - plain
        return cls(
            {length: n for length, n in lengths.items() if n > 0},
            stats.position_drafted,
            stats.position_accepted,
            widths,
            plain,
            stats.graph_rebuilds,
            stats.tree_rounds,
            stats.leaves,
            stats.side_rounds,
        )

    @classmethod
    def sum(cls, parts: Iterable[Acceptance]) -> Acceptance:
        lengths: dict[int, int] = {}
        widths: dict[int, int] = {}
        drafted: list[int] = []
        accepted: list[int] = []
        plain = rebuilds = trees = leaves = on_side = 0
        for part in parts:
            _add(lengths, part.lengths)
            _add(widths, part.widths)
            _add_list(drafted, part.drafted)
            _add_list(accepted, part.accepted)
            plain += part.plain_rounds
            rebuilds += part.graph_rebuilds
            trees += part.tree_rounds
            leaves += part.leaves
            on_side += part.side_rounds
        ordered = (dict(sorted(counts.items())) for counts in (lengths, widths))
        lengths, widths = ordered
        return cls(lengths, drafted, accepted, widths, plain, rebuilds, trees, leaves, on_side)

    @property
    def mean_length(self) -> float | None:
        """Tokens per verify pass; None where no draft was ever checked."""
        tokens = sum(n * length for length, n in self.lengths.items())
        return tokens / self.n_rounds if self.n_rounds else None

    @property
    def n_rounds(self) -> int:
        """Those that had drafts."""
        return sum(self.lengths.values())

    @property
    def nodes(self) -> float | None:
        """Drafted tokens of a round; None where there were none."""
        n = sum((width - 1) * rounds for width, rounds in self.widths.items() if width > 1)
        return n / self.n_rounds if self.n_rounds else None

    @property
    def mean_rows(self) -> float | None:
        """Of a pass, those without drafts included; None where there were none."""
        n = sum(self.widths.values())
        return sum(width * rounds for width, rounds in self.widths.items()) / n if n else None

    @property
    def depth(self) -> float | None:
        """Tokens of its longest branch: a chain's are all."""
        return sum(self.drafted) / self.n_rounds if self.n_rounds else None

    @property
    def branches(self) -> float | None:
        """Its leaves: one of a chain."""
        if not self.n_rounds:
            return None
        return (self.leaves + self.n_rounds - self.tree_rounds) / self.n_rounds

    @property
    def side_share(self) -> float | None:
        """Of the rounds, those that kept another branch than the chain of the drafter's best."""
        return self.side_rounds / self.n_rounds if self.n_rounds else None

    @property
    def by_position(self) -> list[float]:
        """Share of the drafts verified at position 1, 2, ... that were accepted."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [kept / tried if tried else 0.0 for kept, tried in pairs]

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_length": _rounded(self.mean_length),
            "nodes": _rounded(self.nodes),
            "depth": _rounded(self.depth),
            "branches": _rounded(self.branches),
            "side_share": _rounded(self.side_share),
            "accepted_lengths": {str(length): n for length, n in self.lengths.items()},
            "acceptance_by_position": [significant(share) for share in self.by_position],
            "widths": {str(width): n for width, n in self.widths.items()},
            "plain_rounds": self.plain_rounds,
            "graph_rebuilds": self.graph_rebuilds,
            "tree_rounds": self.tree_rounds,
            "leaves": self.leaves,
            "side_rounds": self.side_rounds,
        }


def cost_curve(
    target: Target, widths: Sequence[int], *, depth: int = CURVE_DEPTH, repeats: int = 7
) -> dict[int, float]:
    """Seconds of a target pass by its number of rows, after `depth` tokens; medians.

    Uses sequence 0, which must be empty and is empty again afterwards.
    """
    depth = max(1, min(depth, target.n_ctx - max(widths)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, target.n_vocab, depth + max(widths), dtype=np.int32)
    found = {}
    try:
        for begin in range(0, depth, target.n_batch):
            chunk = tokens[begin : min(depth, begin + target.n_batch)]
            n = len(chunk)
            target.decode(chunk, range(begin, begin + n), [0] * n, [False] * n)
        for width in widths:
            rows = tokens[depth : depth + width]
            times = []
            # The first pass of a width builds its graph, which rounds of equal width do not.
            for _ in range(repeats + 1):
                start = time.perf_counter()
                target.decode(rows, range(depth, depth + width), [0] * width, [True] * width)
                times.append(time.perf_counter() - start)
                target.truncate(0, depth)
            found[width] = float(np.median(times[1:]))
    finally:
        target.clear(0)
    return found


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one too; None for equal answers."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def significant(value: float) -> float:
    """Six significant digits, for JSON that people read."""
    return float(f"{value:.6g}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else significant(value)


def _overall(answers: Sequence[Answer]) -> float | None:
    seconds = sum(answer.stats.decode_s for answer in answers)
    return sum(answer.n_decoded for answer in answers) / seconds if seconds > 0 else None


def _spread(found: Spread | None) -> dict[str, float] | None:
    return found.as_dict() if found else None


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for key, n in more.items():
        total[key] = total.get(key, 0) + n


def _add_list(total: list[int], more: Sequence[int]) -> None:
    total.extend([0] * (len(more) - len(total)))
    for i, n in enumerate(more):
        total[i] += n
