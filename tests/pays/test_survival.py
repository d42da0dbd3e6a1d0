"""The chance of each draft to be kept: face value first, then what is seen."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from typing import Any

import pytest

from dflash_local.pays.survival import Prior, Survival
from simulation import CODE, TEXTS, Text

BLOCK = 16


def follow(
    survival: Survival, text: Text, rounds: int, seed: int = 0, width: int = 16
) -> list[tuple[float, float]]:
    """(foreseen, true) sums of survival of each draft, as it was foreseen."""
    rng = random.Random(seed)
    sums = []
    for _ in range(rounds):
        logprobs, chances = text(rng, 0.0)
        survival.notice(logprobs)
        foreseen = survival.curve(logprobs)
        true = [math.prod(chances[: j + 1]) for j in range(len(chances))]
        sums.append((sum(foreseen), sum(true)))
        kept = 0
        while kept < width - 1 and rng.random() < chances[kept]:
            kept += 1
        survival.observe(logprobs, width - 1, kept)
    return sums


def mean_of(sums: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in sums) / len(sums), sum(b for _, b in sums) / len(sums)


def test_confidence_is_taken_at_face_value_at_first() -> None:
    survival = Survival(Prior(BLOCK))
    for p in (0.4, 0.5, 0.8, 0.95, 0.99):
        assert survival.curve([math.log(p)])[0] == pytest.approx(p, abs=0.05)


def test_survival_never_rises_along_a_chain() -> None:
    rng = random.Random(1)
    survival = Survival(Prior(BLOCK))
    for _ in range(50):
        curve = survival.curve([-rng.expovariate(0.5) for _ in range(15)])
        assert all(a >= b for a, b in pairwise(curve))
        assert 0 <= curve[-1] <= curve[0] <= 1


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "switching"])
def test_what_is_foreseen_comes_true(name: str) -> None:
    """After 40 rounds, the tokens foreseen are those that come, whatever confidence says."""
    sums = follow(Survival(Prior(BLOCK)), TEXTS[name], 240)
    foreseen, true = mean_of(sums[40:])
    assert foreseen == pytest.approx(true, rel=0.15, abs=0.1)


def test_a_turn_of_the_text_is_noticed() -> None:
    """From drafts that are kept to such that are not, which log-probabilities do not tell."""
    survival = Survival(Prior(BLOCK))
    follow(survival, TEXTS["geometric 0.85"], 100)
    foreseen, true = mean_of(follow(survival, TEXTS["geometric 0.3"], 60)[25:])
    assert foreseen == pytest.approx(true, abs=0.5)  # 5.2 before
    foreseen, true = mean_of(follow(survival, TEXTS["geometric 0.85"], 60)[25:])
    assert foreseen == pytest.approx(true, rel=0.3)


def test_a_request_begins_with_what_others_have_seen() -> None:
    prior = Prior(BLOCK)
    follow(Survival(prior), TEXTS["over-confident"], 100)
    cold, seeded = Survival(Prior(BLOCK)), Survival(prior)
    error = []
    for survival in (cold, seeded):
        foreseen, true = mean_of(follow(survival, TEXTS["over-confident"], 3, seed=5))
        error.append(abs(foreseen - true))
    assert error[1] < error[0] / 2
    assert sum(Survival(prior).typical()) < sum(Survival(Prior(BLOCK)).typical())


def test_hope_shrinks_as_drafts_are_seen_and_grows_in_a_pause() -> None:
    survival = Survival(Prior(BLOCK))
    chain = [-0.5] * 15

    def hope() -> float:
        return sum(survival.hopeful(chain)) - sum(survival.curve(chain))

    at_first = hope()
    follow(survival, TEXTS["geometric 0.6 certain"], 60)
    follow(survival, CODE, 60)
    known = hope()
    assert 0 < known < at_first
    survival.rest(500)
    assert hope() > known


def test_odd_log_probabilities() -> None:
    survival = Survival(Prior(BLOCK))
    odd = [-math.inf, math.nan, 1e-7, 5.0, -1e9, 0.0]
    survival.notice(odd)
    assert all(0 <= chance <= 1 for chance in survival.curve(odd))
    assert all(0 <= chance <= 1 for chance in survival.hopeful(odd))
    survival.observe(odd, len(odd), len(odd))
    survival.observe(odd, len(odd), 0)
    survival.observe([], 0, 0)
    assert all(0 <= chance <= 1 for chance in survival.curve(odd))


def test_drafts_cut_short_by_the_end_of_an_answer_say_nothing_of_longer_ones() -> None:
    survival = Survival(Prior(BLOCK))
    survival.notice([-0.01] * 15)
    before = survival.typical()
    survival.notice([-0.01] * 2)
    assert survival.typical() == pytest.approx(before)


def test_far_less_kept_than_promised() -> None:
    fooled = Survival(Prior(BLOCK))
    follow(fooled, TEXTS["over-confident"], 60)
    short = fooled.shortfall()
    assert short is not None
    kept, promised = short
    assert kept < 0.6 * promised
    honest = Survival(Prior(BLOCK))
    follow(honest, CODE, 60)
    assert honest.shortfall() is None
    silent = Survival(Prior(BLOCK))  # gives no probabilities
    follow(silent, TEXTS["geometric 0.6 certain"], 60)
    assert silent.shortfall() is None


def test_a_prior_is_kept_and_read_again() -> None:
    prior = Prior(8)
    survival = Survival(prior)
    for accepted in (3, 0, 7, 2, 5) * 12:
        survival.notice([-0.2] * 7)
        survival.observe([-0.2] * 7, 7, accepted)
    again = Prior.from_dict(json.loads(json.dumps(prior.as_dict())), 8)
    assert again.rounds == prior.rounds and again.curve == pytest.approx(prior.curve)
    chain = [-0.1, -0.5, -2.0]
    assert Survival(again).curve(chain) == pytest.approx(Survival(prior).curve(chain))


@pytest.mark.parametrize(
    "raw", [None, {}, {"rounds": 1, "curve": [0.5], "filter": [0] * 5}, {"curve": "x"}]
)
def test_what_is_no_prior_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="no prior"):
        Prior.from_dict(raw, 8)
