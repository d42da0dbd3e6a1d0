"""Medians and spreads."""

import pytest

from dflash_local.bench.measure.speed import STAGES, Speed, Spread, TimedAnswer
from dflash_local.stats import Stats


def answer(n_rounds: int, seconds: float) -> TimedAnswer:
    """Plain rounds, and the token of the prompt's last row."""
    stats = Stats(emitted=1, decode_s=seconds, verify_s=seconds / 2, ttft_s=0.1)
    for _ in range(n_rounds):
        stats.record_round(drafted=0, emitted=1)
    return TimedAnswer([0] * (n_rounds + 1), stats)


def test_spread_of_few_values_is_their_range() -> None:
    assert Spread.of([]) is None
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0, 2)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_answers_add_up() -> None:
    speed = Speed.of([answer(10, 1.0), answer(30, 1.0)])
    assert speed.median == 20.0 and speed.overall_tokens_per_second == 20.0
    assert (speed.n_answers, speed.n_tokens, speed.n_too_short) == (2, 42, 0)
    assert set(speed.stage_s) == set(STAGES)
    assert speed.stage_s["verify"] == speed.stage_s["host"] == pytest.approx(1 / 40)


def test_too_short_answers_do_not_count_for_speed() -> None:
    speed = Speed.of([answer(3, 1.0)])
    assert (speed.n_answers, speed.n_too_short) == (1, 1)
    assert speed.tokens_per_second is None and speed.overall_tokens_per_second is None
    assert speed.ttft_s is not None and speed.stage_s == {}
