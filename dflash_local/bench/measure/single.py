"""One request at a time: every prompt decoded plainly and with drafts in turn, so that a drift of
the machine hits both alike."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.rounding import Lead, lead_after
from dflash_local.bench.measure.settings import PLAIN, CacheState, RunSettings, Say, Variant
from dflash_local.bench.measure.speed import Speed, Spread, TimedAnswer, ask, first_difference
from dflash_local.bench.prompts.case import Case
from dflash_local.model import Model

_WARM_UP_TOKENS = 16
_PROMPT_SPEED = 10
_FEW_ROUNDS = 16
_FORCED_PROMPTS, _FORCED_TOKENS = 2, 64
_EVERY_S = 10.0
"""Between two lines. More often they would hide the results, less often a run seems to hang."""


@dataclass(frozen=True)
class Difference:
    """A greedy answer that differs from plain decoding's, first at token `at`.

    `lead` is that of plain decoding's likeliest token there.
    """

    case: Case
    variant: Variant
    cache: CacheState
    at: int
    lead: Lead

    def as_dict(self) -> dict[str, Any]:
        return {
            "category": self.case.category,
            "prompt": self.case.index,
            "variant": self.variant,
            "cache": self.cache,
            "token": self.at,
            "lead": self.lead,
            "is_within_rounding": self.lead.is_within_rounding,
        }


@dataclass(frozen=True)
class SpeedRow:
    """A category at one temperature and one state of the caches: one variant against plain.

    `ratio` is that of tokens/s, `ttft_ratio` that of the times to first token: drafted over plain,
    prompt by prompt; `over` is `ratio` over the other variants. Without a drafter `variant` is
    `PLAIN` and `drafted` None.
    """

    category: str
    temperature: float
    cache: CacheState
    variant: Variant
    n_prompts: int
    plain: Speed
    drafted: Speed | None
    ratio: Spread | None
    ttft_ratio: Spread | None
    acceptance: Acceptance
    over: dict[Variant, Spread] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    forced: Acceptance | None = None
    """If the controller hardly drafted: the acceptance of a few answers with whole blocks of
    drafts. No other number counts them."""
    drafting: str | None = None
    """Why the controller drafted or did not, by the last answer."""
    warnings: list[str] = field(default_factory=list)

    @property
    def shown(self) -> Acceptance:
        """The acceptance that says most about the drafter."""
        return self.forced or self.acceptance

    @property
    def drafted_median(self) -> float | None:
        """Tokens/s; None if nothing was drafted or all answers were too short."""
        return self.drafted.median if self.drafted else None

    def as_dict(self) -> dict[str, Any]:
        over = [{"variant": other, "ratio": ratio} for other, ratio in self.over.items()]
        return {**vars(self), "over": over, "n_differing": len(self.differences)}


class Pace:
    """Counts answers, and tells now and then how many are left."""

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self._clock = clock
        self._n = self._n_done = 0
        self._work = self._done = 0.0
        self._began = self._said = clock()

    def start(self, n: int, work: float) -> None:
        """`n` answers are to come, which take so much `work` together, in any unit."""
        self._n, self._work = n, work
        self._began = self._said = self._clock()

    def count(self, work: float) -> None:
        self._n_done += 1
        self._done += work
        now = self._clock()
        if now - self._said >= _EVERY_S and self._n_done < self._n:
            self._said = now
            self.say(f"{self._n_done} of {self._n} answers, {self.left}")

    @property
    def left(self) -> str:
        """The time that is left, as in "about 2 min left"."""
        spent = self._clock() - self._began
        seconds = spent * (self._work - self._done) / self._done if self._done else 0.0
        if seconds < 100:
            return f"about {max(1, round(seconds))} s left"
        return f"about {round(seconds / 60)} min left"


def by_category(
    model: Model, cases: Sequence[Case], settings: RunSettings, pace: Pace
) -> Iterator[list[SpeedRow]]:
    """Measure all cases. Gives the rows of each category as soon as it is measured, and tells of
    each. When it is interrupted, the prompts that were measured with all variants make the last
    rows. Raises as `Model`."""
    for temperature in settings.temperatures:
        _Answers(model, cases[:1], temperature, settings, pace).warm_up()
    n_each = settings.repeat * len(settings.temperatures) * len(settings.caches)
    n_each *= len(settings.turns())
    pace.start(n_each * len(cases), n_each * sum(_work(case, settings) for case in cases))
    for temperature in settings.temperatures:
        for category in dict.fromkeys(case.category for case in cases):
            own = [case for case in cases if case.category == category]
            answers = _Answers(model, own, temperature, settings, pace)
            try:
                answers.measure()
                new = list(answers.rows())
            except KeyboardInterrupt:
                if answers.keep_complete():
                    yield list(answers.rows(forced=False))
                raise
            yield new  # before it is told: who interrupts after the line finds its rows
            pace.say(_progress(new))


def _work(case: Case, settings: RunSettings) -> float:
    """About how long an answer takes, in tokens decoded; those of a prompt are read faster."""
    n = settings.max_tokens if case.answer is None else min(settings.max_tokens, len(case.answer))
    return n + len(case.tokens) / _PROMPT_SPEED


@dataclass
class _Answers:
    """The answers to one category's prompts at one temperature."""

    model: Model
    cases: Sequence[Case]
    temperature: float
    settings: RunSettings
    pace: Pace

    def __post_init__(self) -> None:
        # In the same order of cases in each list.
        self._answers: dict[tuple[Variant, CacheState], list[TimedAnswer]] = {
            key: [] for key in product(self.settings.turns(), self.settings.caches)
        }

    def warm_up(self) -> None:
        """A short answer of every variant, so that no measured one pays for work done once."""
        for variant in self.settings.turns():
            self._ask(self.cases[0], variant, min(_WARM_UP_TOKENS, self.settings.max_tokens))

    def measure(self) -> None:
        for repeat in range(self.settings.repeat):
            for i, case in enumerate(self.cases):
                for variant in self.settings.turns(repeat * len(self.cases) + i):
                    self.model.forget()
                    for cache in self.settings.caches:
                        answer = self._ask(case, variant, self.settings.max_tokens, repeat)
                        self._answers[variant, cache].append(answer)
                        self.pace.count(_work(case, self.settings))

    def _ask(self, case: Case, variant: Variant, max_tokens: int, repeat: int = 0) -> TimedAnswer:
        return ask(
            self.model,
            case.tokens,
            variant,
            temperature=self.temperature,
            seed=self.settings.seed + repeat,
            max_tokens=max_tokens,
        )

    def keep_complete(self) -> int:
        """Keep only the prompts that all variants have answered; the number of answers of each."""
        n = min(map(len, self._answers.values()))
        for answers in self._answers.values():
            del answers[n:]
        return n

    def rows(self, *, forced: bool = True) -> Iterator[SpeedRow]:
        """`forced`: look at the drafter's worth where it was hardly used."""
        for variant in self.settings.variants or (PLAIN,):
            found = self._forced(variant) if forced else None
            for cache in self.settings.caches:
                yield self._row(variant, cache, found)

    def _forced(self, variant: Variant) -> Acceptance | None:
        """The drafter's worth where the controller hardly used it."""
        drafter = self.model.drafter
        found = chain(*(self._answers[variant, cache] for cache in self.settings.caches))
        rounds = Acceptance.of(answer.stats for answer in found).n_rounds
        if variant.width != "auto" or drafter is None or rounds >= _FEW_ROUNDS:
            return None
        whole = replace(variant, width=drafter.block_size)
        n = min(self.settings.max_tokens, _FORCED_TOKENS)
        return Acceptance.of(
            self._ask(case, whole, n).stats for case in self.cases[:_FORCED_PROMPTS]
        )

    def _row(self, variant: Variant, cache: CacheState, forced: Acceptance | None) -> SpeedRow:
        plain, drafted = self._answers[PLAIN, cache], self._answers[variant, cache]
        pairs = list(zip(plain, drafted, strict=True)) if variant != PLAIN else []
        return SpeedRow(
            category=self.cases[0].category,
            temperature=self.temperature,
            cache=cache,
            variant=variant,
            n_prompts=min(len(self.cases), len(plain)),
            plain=Speed.of(plain),
            drafted=Speed.of(drafted) if pairs else None,
            ratio=_speed_ratio(pairs),
            over={
                other: ratio
                for other in self.settings.variants
                if other != variant
                and (ratio := _speed_ratio(zip(self._answers[other, cache], drafted, strict=True)))
            },
            ttft_ratio=Spread.of(b.stats.ttft_s / a.stats.ttft_s for a, b in pairs),
            acceptance=Acceptance.of(b.stats for _, b in pairs),
            differences=self._differences(variant, cache, pairs),
            forced=forced,
            drafting=drafted[-1].stats.drafting if pairs else None,
            warnings=list(dict.fromkeys(b.stats.warning for _, b in pairs if b.stats.warning)),
        )

    def _differences(
        self, variant: Variant, cache: CacheState, pairs: Sequence[tuple[TimedAnswer, TimedAnswer]]
    ) -> list[Difference]:
        if self.temperature > 0 or not self.settings.compare:
            return []
        found = []
        # Only the first answer to each case: a repetition of a greedy answer is the same answer.
        for case, (plain, drafted) in zip(self.cases, pairs, strict=False):
            at = first_difference(plain.tokens, drafted.tokens)
            if at is not None:
                lead = self._lead(case, plain, at, variant)
                found.append(Difference(case, variant, cache, at, lead))
        return found

    def _lead(self, case: Case, plain: TimedAnswer, at: int, variant: Variant) -> Lead:
        """At a token of plain decoding's answer; at its last one where the other goes on."""
        self.model.forget()
        target = self.model.target
        widths = {2, 4, 8, 16, *(v.width for v in self.settings.variants if v.width != "auto")}
        if self.model.engine.copies:  # with more rows, which a GPU may compute by other kernels
            widths |= {min(32, target.max_width), target.max_width}
        return lead_after(
            target,
            case.tokens,
            plain.tokens[: min(at, len(plain.tokens) - 1)],
            sorted(width for width in widths if 1 < width <= target.n_batch),
            forked=variant.shape != "chain" and self.model.engine.takes_trees,
        )


def _speed_ratio(pairs: Iterable[tuple[TimedAnswer, TimedAnswer]]) -> Spread | None:
    return Spread.of(
        b.stats.tokens_per_second / a.stats.tokens_per_second
        for a, b in pairs
        if a.counts and b.counts
    )


def _progress(rows: Sequence[SpeedRow]) -> str:
    """A line about a category that is done: its speeds from empty caches."""
    cold = [row for row in rows if row.cache == "cold"]
    about = f"{cold[0].category}, temperature {cold[0].temperature:g}:"
    if cold[0].plain.median is None:
        return f"{about} answers too short to be timed"
    parts = [f"{about} plain", _rate(cold[0].plain)]
    for row in cold:
        if row.drafted and row.ratio:
            parts.append(f"| {row.variant} {_rate(row.drafted)} ({row.ratio.median:.2f})")
    return " ".join(parts) + " tokens/s"


def _rate(speed: Speed) -> str:
    return "none" if speed.median is None else f"{speed.median:.4g}"
