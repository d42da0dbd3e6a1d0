"""Learning from copied tokens, by one request and by those after it."""

import json
from itertools import accumulate
from operator import mul
from random import Random

import numpy as np
import pytest

from copies import copies_of
from dflash_local.copies.chances import (
    AGREES,
    DIFFERS,
    N_KINDS,
    CopyChances,
    CopyPrior,
    drafter_thinks,
)
from dflash_local.copies.copier import Copier
from dflash_local.llama import native

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


def learn(offers: native.CopyOffers, kind: int, is_right: bool) -> None:
    """Learn the outcome of one offered token of this kind."""
    offers.take_kinds([([1], [kind])])
    offers.learn(native.CopyIndex(), [1 if is_right else 2])


def test_a_drafter_that_agrees_is_believed_and_one_that_differs_too() -> None:
    chances = CopyChances(CopyPrior())
    for kind in range(0, N_KINDS // 3):
        none, agrees, differs = chances.each(
            [kind, drafter_thinks(kind, AGREES), drafter_thinks(kind, DIFFERS)]
        )
        assert differs < none < agrees


def test_it_is_kept_for_the_next_process() -> None:
    prior = CopyPrior()
    offers = native.CopyOffers(prior)
    for i in range(1000):
        learn(offers, i % 7, i % 3 == 0)
    again = CopyPrior.from_dict(json.loads(json.dumps(prior.as_dict())))
    assert (again.right, again.tried) == (prior.right, prior.tried)


def test_what_greedy_requests_repeat_says_little_of_those_that_draw() -> None:
    prior = CopyPrior()
    cold, drawn = CopyPrior().right[3], prior.of(greedy=False)
    for _ in range(50):
        learn(native.CopyOffers(prior.of(greedy=True)), 3, True)
    assert prior.of(greedy=False).right[3] == cold
    learn(native.CopyOffers(drawn), 3, False)
    again = CopyPrior.from_dict(json.loads(json.dumps(prior.as_dict())))
    assert again.of(greedy=True).right[3] == cold + 50
    assert again.of(greedy=False).tried == drawn.tried != prior.tried


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {"x": [1, 2]},
        {"1": [3.0, 2.0]},
        {"1": [1, 10**400]},
        {"-1": [0, 1]},
        {"drawn": {"1": [3.0, 2.0]}},
    ],
)
def test_what_is_damaged_is_refused(raw: object) -> None:
    with pytest.raises(ValueError, match="no chances of copies"):
        CopyPrior.from_dict(raw)


def test_nothing_is_offered_where_nothing_repeats() -> None:
    copier = Copier(CopyPrior())
    assert copies_of(copier, list(range(50)), [], 8) == []
    assert copies_of(copier, list(range(50)), [90, 91], 8) == []
    assert copies_of(copier, list(range(50)), [90, 91, 3, 4], 0) == []


class ByTheFormulas:
    """`CopyChances` in the words of its comments."""

    def __init__(self, prior: CopyPrior) -> None:
        self.tried, self.right = prior.tried, prior.right
        self.own: dict[int, list[bool]] = {}
        self.expected, self.seen = [1.0, 1.0], [1.0, 1.0]

    def chance(self, kind: int) -> float:
        own = self.own.get(kind, [])
        others = self.right[kind] / self.tried[kind]
        return min((sum(own) + 8.0 * others) / (len(own) + 8.0), 0.999)

    def each(self, kinds: list[int]) -> list[float]:
        trust = [min(s / e, 1.0) for s, e in zip(self.seen, self.expected, strict=True)]
        return [self.chance(kind) * trust[kind % 9 >= 5] for kind in kinds]

    def expect(self, group: bool, chance: float, is_right: bool) -> None:
        self.expected[group] = 1.0 + 0.97 * (self.expected[group] - 1.0) + chance
        self.seen[group] = 1.0 + 0.97 * (self.seen[group] - 1.0) + is_right

    def learn(self, kind: int, is_right: bool) -> None:
        self.expect(kind % 9 >= 5, self.chance(kind), is_right)
        self.own.setdefault(kind, []).append(is_right)
        fades = 0.5 if self.tried[kind] + 1.0 > 400.0 else 1.0
        self.tried[kind] = fades * (self.tried[kind] + 1.0)
        self.right[kind] = fades * (self.right[kind] + is_right)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_learnt_of_a_text_is_what_the_formulas_say(seed: int) -> None:
    random, prior = Random(seed), CopyPrior()
    for request in range(3):
        known = ByTheFormulas(prior)
        copier, prompt = Copier(prior), [random.randrange(4 + seed) for _ in range(200)]
        text: list[int] = []
        for _ in range(150):
            copies = copies_of(copier, prompt, text, 8)
            for copy in copies:
                assert copy.chances == pytest.approx(known.each(copy.kinds), rel=1e-12)
            new = [random.randrange(4 + seed + 20 * request) for _ in range(random.randint(1, 3))]
            if copies and random.random() < 0.7:
                new = copies[0].tokens[: random.randint(1, 8)]
            text += new
            for copy in copies:
                for token, kind, written in zip(copy.tokens, copy.kinds, new, strict=False):
                    known.learn(kind, token == written)
                    if token != written:
                        break
            if not copies:
                for _ in new:
                    known.expect(False, 0.2, False)
        copies_of(copier, prompt, text, 0)
        assert prior.right == pytest.approx(known.right, rel=1e-12)
        assert prior.tried == pytest.approx(known.tried, rel=1e-12)


def test_a_copy_is_worth_a_look_where_it_brings_enough_at_some_length() -> None:
    copier = Copier(CopyPrior())
    (copy, *_) = copies_of(copier, PROMPT, [], 4)
    expected = list(accumulate(accumulate(copy.chances, mul)))
    for k, most in enumerate(expected):
        for enough, more in ((True, -1e-9), (False, 1e-9)):
            least = np.full(9, np.inf)
            least[k] = most + more
            assert copier.finds(PROMPT, [], 4, least) == enough
    assert not copier.finds(PROMPT, [], 4, np.full(0, 0.0))
    assert not copier.finds(PROMPT, [], 4, np.full(9, np.inf))
    before = copier.chances.each(copy.kinds)
    copier.finds(PROMPT, [copy.tokens[0]], 4, np.full(9, np.inf))  # it is learnt from all the same
    assert copier.chances.each(copy.kinds)[0] > before[0]
