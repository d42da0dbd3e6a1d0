"""Several requests at once through the engine's sequences: total and per-request rates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_local.bench.measure.single import Restart, Say, Settings, begin_anyhow
from dflash_local.bench.measure.speed import PLAIN, Acceptance, Answer, Speed, Spread, Way
from dflash_local.bench.prompts.case import Case
from dflash_local.engine.request import Request
from dflash_local.sampling.params import SamplingParams

if TYPE_CHECKING:
    from dflash_local.engine.engine import Engine
    from dflash_local.engine.sequence import Sequence as Running

_WARM_UP_TOKENS = 8
TURNS = 2
"""Requests per place: when one ends, another takes its place, as at a server."""


@dataclass(frozen=True)
class Together:
    """Requests run `n` at a time. `total` are tokens/s of all, prompts and waiting included."""

    total: Spread
    speed: Speed
    acceptance: Acceptance

    def as_dict(self) -> dict[str, Any]:
        return {
            "total_tokens_per_second": self.total.as_dict(),
            "per_request": self.speed.as_dict(),
            **self.acceptance.as_dict(),
        }


@dataclass(frozen=True)
class ConcurrencyRow:
    """A category at `n` requests at once, one way against plain; `ratio` is that of totals."""

    category: str
    temperature: float
    n: int
    way: Way
    plain: Together
    drafted: Together | None
    ratio: Spread | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "category": self.category,
            "temperature": self.temperature,
            "concurrency": self.n,
            **self.way.as_dict(),
            "plain": self.plain.as_dict(),
            "drafted": self.drafted.as_dict() if self.drafted else None,
            "ratio": self.ratio.as_dict() if self.ratio else None,
        }


def run_together(
    engine: Engine,
    cases: Sequence[Case],
    levels: Sequence[int],
    settings: Settings,
    say: Say,
    restart: Restart = begin_anyhow,
) -> tuple[list[ConcurrencyRow], list[str]]:
    """Measure each category at each level, by turns plain and with drafts; rows, and notes on what
    did not fit. The caller owns the engine for that time. Raises what the engine raises."""
    rows: list[ConcurrencyRow] = []
    notes: list[str] = []
    categories = dict.fromkeys(case.category for case in cases)
    most = max((engine.widest(way.shape) for way in settings.ways), default=0)
    for n in levels:
        for category in categories:
            group = [case for case in cases if case.category == category]
            longest = max(len(case.tokens) for case in group)
            needed = n * (longest + settings.max_tokens + most + 1)
            if needed > engine.target.n_ctx:
                notes.append(
                    f"{category}, {n} at once: left out, it needs {needed} tokens of context and "
                    f"there are {engine.target.n_ctx}"
                )
                continue
            for temperature in settings.temperatures:
                new = _level(engine, group, n, temperature, settings, restart)
                say(_progress(new))
                rows += new
    return rows, notes


def _level(
    engine: Engine,
    group: Sequence[Case],
    n: int,
    temperature: float,
    settings: Settings,
    restart: Restart,
) -> list[ConcurrencyRow]:
    prompts = [group[i % len(group)].tokens for i in range(TURNS * n)]
    found: dict[Way, list[tuple[float, list[Answer]]]] = {way: [] for way in settings.turns()}
    for way in settings.turns():
        _pass(engine, prompts[:n], n, way, temperature, settings.seed, _WARM_UP_TOKENS)
    for repeat in range(max(2, settings.repeat)):
        for way in settings.turns(repeat):
            seed = settings.seed + repeat
            restart(repeat * len(prompts) * settings.max_tokens)
            found[way].append(
                _pass(engine, prompts, n, way, temperature, seed, settings.max_tokens)
            )
    plain = _together(found[PLAIN])
    rows = []
    for way in settings.ways or (PLAIN,):
        totals = zip(found[way], found[PLAIN], strict=True)
        rows.append(
            ConcurrencyRow(
                category=group[0].category,
                temperature=temperature,
                n=n,
                way=way,
                plain=plain,
                drafted=_together(found[way]) if way != PLAIN else None,
                ratio=Spread.of(a[0] / b[0] for a, b in totals) if way != PLAIN else None,
            )
        )
    return rows


def _pass(
    engine: Engine,
    prompts: Sequence[list[int]],
    n: int,
    way: Way,
    temperature: float,
    seed: int,
    max_tokens: int,
) -> tuple[float, list[Answer]]:
    """All prompts, `n` at a time, from empty caches: tokens/s in total, and the answers."""
    engine.forget_all()
    waiting = deque(enumerate(prompts))
    running: list[tuple[Running, float]] = []
    answers: list[Answer] = []
    start = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < n:
                i, prompt = waiting.popleft()
                sampling = SamplingParams(temperature=temperature, seed=seed + i)
                request = Request(prompt, sampling, max_tokens, way.width, draft_shape=way.shape)
                running.append((engine.begin(request), time.perf_counter()))
            engine.step([sequence for sequence, _ in running])
            for sequence, begun in [r for r in running if r[0].finish_reason is not None]:
                engine.end(sequence)
                running.remove((sequence, begun))
                answers.append(Answer(sequence.tokens, sequence.stats, sequence.stats.ttft_s))
    finally:
        for sequence, _ in running:
            engine.end(sequence)
    seconds = time.perf_counter() - start
    return sum(len(answer.tokens) for answer in answers) / seconds, answers


def _together(passes: Sequence[tuple[float, list[Answer]]]) -> Together:
    answers = [answer for _, found in passes for answer in found]
    total = Spread.of(rate for rate, _ in passes)
    assert total is not None, "a level is measured at least twice"
    return Together(total, Speed.of(answers), Acceptance.of(answer.stats for answer in answers))


def _progress(rows: Sequence[ConcurrencyRow]) -> str:
    first = rows[0]
    parts = [
        f"{first.category}, temperature {first.temperature:g}, {first.n} at once: "
        f"plain {first.plain.total.median:.4g}"
    ]
    for row in rows:
        if row.drafted and row.ratio:
            total = row.drafted.total.median
            parts.append(f"| {row.way} {total:.4g} ({row.ratio.median:.2f})")
    return " ".join(parts) + " tokens/s in total"
