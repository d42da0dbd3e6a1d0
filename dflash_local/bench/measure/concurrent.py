"""Several requests at once through the engine's sequences: speed of all together, and of each."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.bench.measure.settings import PLAIN, RunSettings, Say, Variant
from dflash_local.bench.measure.speed import Speed, Spread, TimedAnswer
from dflash_local.bench.prompts.case import Case
from dflash_local.engine import sequence
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.sampling.params import SamplingParams

TURNS = 2
"""Requests per place: when one ends, another takes its place, as at a server."""

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ConcurrentSpeed:
    """Requests that ran `n` at a time. The total is that of all, prompts and waiting included."""

    total_tokens_per_second: Spread
    per_request: Speed
    acceptance: Acceptance


@dataclass(frozen=True)
class ConcurrencyRow:
    """So many requests of a category at once: one variant against plain. `ratio`: of totals."""

    category: str
    temperature: float
    concurrency: int
    variant: Variant
    plain: ConcurrentSpeed
    drafted: ConcurrentSpeed | None
    ratio: Spread | None


def measure_concurrent(
    engine: Engine, cases: Sequence[Case], levels: Sequence[int], settings: RunSettings, say: Say
) -> tuple[list[ConcurrencyRow], list[str]]:
    """Measure each category at each of `levels`, numbers of requests at once, by turns plain and
    with drafts. Returns rows, and notes on those that did not fit.

    The caller owns the engine for that time. Raises as the engine.
    """
    rows: list[ConcurrencyRow] = []
    notes: list[str] = []
    categories = dict.fromkeys(case.category for case in cases)
    most = max((engine.widest(variant.shape) for variant in settings.variants), default=0)
    for n in levels:
        for category in categories:
            own = [case for case in cases if case.category == category]
            longest = max(len(case.tokens) for case in own)
            needed = n * (longest + settings.max_tokens + most + 1)
            n_cells = min(n * engine.target.n_ctx, engine.target.n_ctx_all)
            if needed > n_cells:
                notes.append(
                    f"{category}, {n} at once: left out, it needs {needed} tokens of context and "
                    f"there are {n_cells}"
                )
                continue
            for temperature in settings.temperatures:
                new = _level(engine, own, n, temperature, settings)
                say(_progress(new))
                rows += new
    return rows, notes


def _level(
    engine: Engine, cases: Sequence[Case], n: int, temperature: float, settings: RunSettings
) -> list[ConcurrencyRow]:
    """One category at `n` requests at once: a row for each variant."""
    prompts = [cases[i % len(cases)].tokens for i in range(TURNS * n)]
    found: dict[Variant, list[tuple[float, list[TimedAnswer]]]] = {
        variant: [] for variant in settings.turns()
    }
    for variant in settings.turns():
        _answer_all(engine, prompts[:n], n, variant, temperature, settings.seed, _WARM_UP_TOKENS)
    for repeat in range(max(2, settings.repeat)):
        for variant in settings.turns(repeat):
            seed = settings.seed + repeat
            found[variant].append(
                _answer_all(engine, prompts, n, variant, temperature, seed, settings.max_tokens)
            )
    plain = _together(found[PLAIN])
    rows = []
    for variant in settings.variants or (PLAIN,):
        totals = zip(found[variant], found[PLAIN], strict=True)
        rows.append(
            ConcurrencyRow(
                category=cases[0].category,
                temperature=temperature,
                concurrency=n,
                variant=variant,
                plain=plain,
                drafted=_together(found[variant]) if variant != PLAIN else None,
                ratio=Spread.of(a[0] / b[0] for a, b in totals) if variant != PLAIN else None,
            )
        )
    return rows


def _answer_all(
    engine: Engine,
    prompts: Sequence[list[int]],
    n: int,
    variant: Variant,
    temperature: float,
    seed: int,
    max_tokens: int,
) -> tuple[float, list[TimedAnswer]]:
    """All prompts, `n` at a time, none from a cache: tokens/s of all together, and the answers."""
    engine.offers_copies = variant.copies
    engine.slots.forget_all()
    waiting = deque(enumerate(prompts))
    running: list[sequence.Sequence] = []
    answers: list[TimedAnswer] = []
    start = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < n:
                i, prompt = waiting.popleft()
                sampling = SamplingParams(temperature=temperature, seed=seed + i)
                # Prompts come more than once: from the caches the later ones would be free.
                asked = {**variant.options(), "cache_prompt": False}
                request = Request(prompt, sampling, max_tokens, **asked)
                running.append(engine.begin(request))
            engine.step(running)
            for ended in [each for each in running if each.finish_reason is not None]:
                engine.end(ended)
                answers.append(TimedAnswer(ended.tokens, ended.stats))
            running = [each for each in running if each.finish_reason is None]
    finally:
        for each in running:
            engine.end(each)
    seconds = time.perf_counter() - start
    return sum(len(answer.tokens) for answer in answers) / seconds, answers


def _together(passes: Sequence[tuple[float, list[TimedAnswer]]]) -> ConcurrentSpeed:
    answers = [answer for _, found in passes for answer in found]
    total = Spread.of(rate for rate, _ in passes)
    assert total is not None, "a level is measured at least twice"
    acceptance = Acceptance.of(answer.stats for answer in answers)
    return ConcurrentSpeed(total, Speed.of(answers), acceptance)


def _progress(rows: Sequence[ConcurrencyRow]) -> str:
    first = rows[0]
    parts = [
        f"{first.category}, temperature {first.temperature:g}, {first.concurrency} at once: "
        f"plain {first.plain.total_tokens_per_second.median:.4g}"
    ]
    for row in rows:
        if row.drafted and row.ratio:
            total = row.drafted.total_tokens_per_second.median
            parts.append(f"| {row.variant} {total:.4g} ({row.ratio.median:.2f})")
    return " ".join(parts) + " tokens/s in total"
