"""What is learnt of copied tokens, by one request and by those after it."""

from __future__ import annotations

import json

import pytest

from dflash_local.copies.chances import (
    AGREES,
    DIFFERS,
    N_KINDS,
    CopyChances,
    CopyPrior,
    drafter_thinks,
)
from dflash_local.copies.copier import Copier

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


def test_what_comes_true_becomes_likelier_and_what_does_not_less() -> None:
    prior = CopyPrior()
    one, other = CopyChances(prior), CopyChances(prior)
    (before,) = one.each([12])
    for _ in range(20):
        one.learn(12, True)
    (after,) = one.each([12])
    (elsewhere,) = other.each([12])
    assert before < elsewhere < after < 1.0  # its own counts more than that of another request
    for _ in range(60):
        other.learn(12, False)
    assert other.each([12])[0] < 0.2


def test_short_matches_that_mean_nothing_are_found_out_together() -> None:
    """In a text that repeats nothing they come by chance, of all kinds, a few of each."""
    short = [kind for kind in range(36) if kind % 9 < 5]
    long = [kind for kind in range(36) if kind % 9 >= 5]
    chances = CopyChances(CopyPrior())
    before = chances.each(short), chances.each(long)
    for kind in [kind for kind in short if kind % 2 == 0]:
        chances.learn(kind, False)
    unseen = [i for i, kind in enumerate(short) if kind % 2]
    after = chances.each(short)
    assert all(after[i] < before[0][i] / 4 for i in unseen)
    assert chances.each(long) == before[1]
    for _ in range(20):
        chances.learn(short[0], True)
    again = chances.each(short)
    assert all(again[i] > before[0][i] / 2 for i in unseen)  # the text has turned


def test_a_drafter_that_agrees_is_believed_and_one_that_differs_too() -> None:
    chances = CopyChances(CopyPrior())
    for kind in range(0, N_KINDS // 3):
        none, agrees, differs = chances.each(
            [kind, drafter_thinks(kind, AGREES), drafter_thinks(kind, DIFFERS)]
        )
        assert differs < none < agrees


def test_it_is_kept_for_the_next_process() -> None:
    prior = CopyPrior()
    for i in range(1000):
        prior.learn(i % 7, i % 3 == 0)
    again = CopyPrior.from_dict(json.loads(json.dumps(prior.as_dict())))
    assert (again.right, again.tried) == (prior.right, prior.tried)


@pytest.mark.parametrize("raw", [None, [], {"x": [1, 2]}, {"1": [3.0, 2.0]}, {"-1": [0, 1]}])
def test_what_is_damaged_is_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="no chances of copies"):
        CopyPrior.from_dict(raw)


def test_an_offer_teaches_without_being_verified() -> None:
    prior = CopyPrior()
    copier = Copier(prior)
    (copy, *_) = copier.offer(PROMPT, [], 4)
    assert copy.tokens == [4, 5, 6, 7]
    copier.offer(PROMPT, [4, 0, 6], 4)
    right, wrong = (prior.right[kind] / prior.tried[kind] for kind in copy.kinds[:2])
    cold = CopyPrior()
    cold_right, cold_wrong = (cold.right[kind] / cold.tried[kind] for kind in copy.kinds[:2])
    assert right > cold_right and wrong < cold_wrong


def test_nothing_is_offered_where_nothing_repeats() -> None:
    copier = Copier(CopyPrior())
    assert copier.offer(list(range(50)), [], 8) == []
    assert copier.offer(list(range(50)), [90, 91], 8) == []
    assert copier.offer(list(range(50)), [90, 91, 3, 4], 0) == []


def test_a_text_without_offers_is_one_that_repeats_nothing() -> None:
    chances = CopyChances(CopyPrior())
    short, long = 3, 8
    before = chances.each([short, long])
    chances.learn_silence(40)
    after = chances.each([short, long])
    assert after[0] < before[0] / 4
    assert after[1] == before[1]
