"""Every prompt decoded plainly and with drafts in turn, so that drift hits both alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dflash_local.bench.measure.rounding import Lead, lead_after
from dflash_local.bench.measure.speed import (
    PLAIN,
    Acceptance,
    Answer,
    Speed,
    Spread,
    Way,
    ask,
    first_difference,
    significant,
)
from dflash_local.bench.prompts.case import Case

if TYPE_CHECKING:
    from dflash_local.model import Model

Say = Callable[[str], None]
Restart = Callable[[int], None]
"""Told before an answer how many tokens went before it: by drawn acceptance, which begins alike for
all ways."""
Cache = Literal["cold", "hit"]

CACHES: tuple[Cache, ...] = ("cold", "hit")
"""With empty caches, and right after the same prompt."""

_WARM_UP_TOKENS = 16
_FEW_ROUNDS = 16
_FORCED_PROMPTS, _FORCED_TOKENS = 2, 64


@dataclass(frozen=True)
class Settings:
    """How to measure. `ways` are those besides plain decoding, none without a drafter."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    ways: tuple[Way, ...] = (Way(),)
    max_tokens: int = 96
    repeat: int = 1
    seed: int = 0
    compare: bool = True
    """Whether greedy answers with drafts are held against plain ones."""

    def turns(self, i: int = 0) -> Sequence[Way]:
        """Plain decoding and the others, by turns backwards, so that drift hits all."""
        turns = (PLAIN, *self.ways)
        return turns if i % 2 == 0 else turns[::-1]


@dataclass(frozen=True)
class Difference:
    """A greedy answer that parts from plain decoding's at token `at`.

    `lead` is that of plain decoding's likeliest token there.
    """

    case: Case
    way: Way
    cache: Cache
    at: int
    lead: Lead

    def as_dict(self) -> dict[str, Any]:
        return {
            "category": self.case.category,
            "prompt": self.case.index,
            **self.way.as_dict(),
            "cache": self.cache,
            "token": self.at,
            "gap": significant(self.lead.gap),
            "noise": significant(self.lead.noise),
            "is_within_rounding": self.lead.is_within_rounding,
        }


@dataclass(frozen=True)
class Row:
    """A category at one temperature, one state of the caches, and one way against plain.

    `ratio` is that of tokens/s, `ttft_ratio` that of the times to first token, drafted over plain,
    both taken per prompt. Without a drafter `way` is `PLAIN` and `drafted` None.
    """

    category: str
    temperature: float
    cache: Cache
    way: Way
    n_prompts: int
    plain: Speed
    drafted: Speed | None
    ratio: Spread | None
    ttft_ratio: Spread | None
    acceptance: Acceptance
    differences: list[Difference] = field(default_factory=list)
    forced: Acceptance | None = None
    """Of a few answers with whole blocks of drafts, where the controller checked next to none: what
    would be accepted. Their speed is in no number."""
    drafting: str | None = None
    """Why the controller drafted or did not, by the last answer."""
    warnings: list[str] = field(default_factory=list)

    @property
    def shown(self) -> Acceptance:
        """The acceptance that tells most of the drafter."""
        return self.forced or self.acceptance

    def as_dict(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "temperature": self.temperature,
            "cache": self.cache,
            **self.way.as_dict(),
            "n_prompts": self.n_prompts,
            "plain": self.plain.as_dict(),
            "drafted": self.drafted.as_dict() if self.drafted else None,
            "ratio": self.ratio.as_dict() if self.ratio else None,
            "ttft_ratio": self.ttft_ratio.as_dict() if self.ttft_ratio else None,
            **self.acceptance.as_dict(),
            "forced": self.forced.as_dict() if self.forced else None,
            "drafting": self.drafting,
            "warnings": list(self.warnings),
            "n_differing": len(self.differences),
            "differences": [difference.as_dict() for difference in self.differences],
        }


def begin_anyhow(_n_tokens: int) -> None:
    """Where acceptance is earned."""


def run(
    model: Model,
    cases: Sequence[Case],
    settings: Settings,
    say: Say,
    restart: Restart = begin_anyhow,
) -> list[Row]:
    """Measure all cases, category by category; `say` hears of each. Raises what `Model` raises."""
    warm_up(model, cases, settings)
    rows: list[Row] = []
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.category, []).append(case)
    for temperature in settings.temperatures:
        for category, group in groups.items():
            found = _Group(model, category, group, temperature, settings, restart)
            found.measure()
            new = list(found.rows())
            say(_progress(new))
            rows += new
    return rows


def warm_up(model: Model, cases: Sequence[Case], settings: Settings) -> None:
    """A short answer of every way, so that no measured one pays for what only happens once."""
    for case in cases[:1]:
        for way in settings.turns():
            for temperature in settings.temperatures:
                ask(
                    model,
                    case.tokens,
                    way,
                    temperature=temperature,
                    seed=settings.seed,
                    max_tokens=min(_WARM_UP_TOKENS, settings.max_tokens),
                )


class _Group:
    """The answers to a category's prompts at one temperature."""

    def __init__(
        self,
        model: Model,
        category: str,
        cases: Sequence[Case],
        temperature: float,
        settings: Settings,
        restart: Restart,
    ) -> None:
        self._model = model
        self._category = category
        self._cases = cases
        self._temperature = temperature
        self._settings = settings
        self._restart = restart
        # Answers by way and state of the caches, in the same order of cases in each list.
        self._answers: dict[tuple[Way, Cache], list[Answer]] = {
            (way, cache): [] for way in settings.turns() for cache in CACHES
        }

    def measure(self) -> None:
        for repeat in range(self._settings.repeat):
            for i, case in enumerate(self._cases):
                turn = repeat * len(self._cases) + i
                for way in self._settings.turns(turn):
                    self._model.forget()
                    for cache in CACHES:
                        self._restart(turn * self._settings.max_tokens)
                        answer = ask(
                            self._model,
                            case.tokens,
                            way,
                            temperature=self._temperature,
                            seed=self._settings.seed + repeat,
                            max_tokens=self._settings.max_tokens,
                        )
                        self._answers[way, cache].append(answer)

    def rows(self) -> Iterator[Row]:
        for way in self._settings.ways or (PLAIN,):
            forced = self._forced(way)
            for cache in CACHES:
                yield self._row(way, cache, forced)

    def _forced(self, way: Way) -> Acceptance | None:
        """What the drafter is worth where the controller hardly used it."""
        drafter = self._model.drafter
        found = [answer.stats for cache in CACHES for answer in self._answers[way, cache]]
        rounds = Acceptance.of(found).n_rounds
        if way.width != "auto" or drafter is None or rounds >= _FEW_ROUNDS:
            return None
        stats = []
        for turn, case in enumerate(self._cases[:_FORCED_PROMPTS]):
            self._restart(turn * self._settings.max_tokens)
            answer = ask(
                self._model,
                case.tokens,
                Way(drafter.block_size, way.shape),
                temperature=self._temperature,
                seed=self._settings.seed,
                max_tokens=min(self._settings.max_tokens, _FORCED_TOKENS),
            )
            stats.append(answer.stats)
        return Acceptance.of(stats)

    def _row(self, way: Way, cache: Cache, forced: Acceptance | None) -> Row:
        plain, drafted = self._answers[PLAIN, cache], self._answers[way, cache]
        pairs = list(zip(plain, drafted, strict=True)) if way != PLAIN else []
        return Row(
            category=self._category,
            temperature=self._temperature,
            cache=cache,
            way=way,
            n_prompts=len(self._cases),
            plain=Speed.of(plain),
            drafted=Speed.of(drafted) if pairs else None,
            ratio=Spread.of(
                b.stats.tokens_per_second / a.stats.tokens_per_second
                for a, b in pairs
                if a.counts and b.counts
            ),
            ttft_ratio=Spread.of(b.ttft_s / a.ttft_s for a, b in pairs),
            acceptance=Acceptance.of(b.stats for _, b in pairs),
            differences=self._differences(way, cache, pairs),
            forced=forced,
            drafting=drafted[-1].stats.drafting if pairs else None,
            warnings=list(dict.fromkeys(b.stats.warning for _, b in pairs if b.stats.warning)),
        )

    def _differences(
        self, way: Way, cache: Cache, pairs: Sequence[tuple[Answer, Answer]]
    ) -> list[Difference]:
        if self._temperature > 0 or not self._settings.compare:
            return []
        found = []
        # A repetition of a greedy answer is the same answer.
        for case, (plain, drafted) in zip(self._cases, pairs, strict=False):
            at = first_difference(plain.tokens, drafted.tokens)
            if at is not None:
                lead = self._lead(case, plain, at, way)
                found.append(Difference(case, way, cache, at, lead))
        return found

    def _lead(self, case: Case, plain: Answer, at: int, way: Way) -> Lead:
        """At a token of plain decoding's answer; the last one where the other goes on."""
        self._model.forget()
        widths = {2, 4, 8, 16, *(w.width for w in self._settings.ways if w.width != "auto")}
        return lead_after(
            self._model.target,
            case.tokens,
            plain.tokens[: min(at, len(plain.tokens) - 1)],
            sorted(width for width in widths if 1 < width <= self._model.target.n_batch),
            forked=way.shape != "chain" and self._model.engine.takes_trees,
        )


def _progress(rows: Sequence[Row]) -> str:
    """A line about a category that is done: its cold speeds."""
    cold = [row for row in rows if row.cache == "cold"]
    parts = [f"{cold[0].category}, temperature {cold[0].temperature:g}: plain"]
    parts.append(_rate(cold[0].plain))
    for row in cold:
        if row.drafted and row.ratio:
            parts.append(f"| {row.way} {_rate(row.drafted)} ({row.ratio.median:.2f})")
    return " ".join(parts) + " tokens/s"


def _rate(speed: Speed) -> str:
    found = speed.tokens_per_second
    return f"{found.median:.4g}" if found else "none"
