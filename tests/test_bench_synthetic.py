"""Drawn acceptance: as long as asked for, the same each time, at the price of the real one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.bench.synthetic import SyntheticVerifier, mean_length, rates, solve_p
from dflash_local.draft import ANCHOR, Draft
from dflash_local.errors import InputError
from dflash_local.verify import Verdict
from pair_engine import open_engine, request

EOS = 7


class Rounds:
    """Feeds drafts to a verifier and keeps what it asked for."""

    def __init__(self, verifier: SyntheticVerifier, drawn: int = 1000) -> None:
        self.verifier = verifier
        self.drawn = drawn
        self.sampled: list[int] = []
        self.emitted: list[int] = []

    def run(self, draft: Draft) -> Verdict:
        self.sampled.clear()
        self.emitted.clear()
        return self.verifier(draft, self._sample, self._stop)

    def _sample(self, row: int) -> int:
        self.sampled.append(row)
        return self.drawn

    def _stop(self, token: int) -> bool:
        self.emitted.append(token)
        return token == EOS


def chain(n: int) -> Draft:
    return Draft.chain(range(100, 100 + n))


def lengths(verifier: SyntheticVerifier, widths: Iterable[int]) -> list[int]:
    rounds = Rounds(verifier)
    return [len(rounds.run(chain(width - 1)).tokens) for width in widths]


@given(st.floats(1.0, 16.0))
def test_the_solved_chance_gives_the_length(length: float) -> None:
    p = solve_p(length)
    assert mean_length(p, 15) == pytest.approx(length, abs=1e-9)
    assert 1 + sum(rates(p, 15)) == pytest.approx(length, abs=1e-9)


def test_the_ends_are_exact() -> None:
    assert solve_p(1.0) == 0.0
    assert solve_p(16.0) == 1.0
    assert solve_p(8.0, 7) == 1.0


@pytest.mark.parametrize("length", [0.99, 16.01, 0.0, -3.0, float("nan"), float("inf")])
def test_a_length_that_no_block_has_is_refused(length: float) -> None:
    with pytest.raises(InputError, match="expected 1 to 16"):
        solve_p(length)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_chance_that_is_none_is_refused(p: float) -> None:
    with pytest.raises(InputError, match="expected 0 to 1"):
        SyntheticVerifier(p, 0)


@pytest.mark.parametrize("length", [1.0, 1.7, 3.9, 6.5, 12.0, 16.0])
def test_rounds_are_as_long_as_asked_for(length: float) -> None:
    found = lengths(SyntheticVerifier(solve_p(length), 1), [16] * 640)
    assert sum(found) / len(found) == pytest.approx(length, abs=0.05)


def test_each_draft_survives_as_often_as_the_rates_say() -> None:
    p = solve_p(6.5)
    found = lengths(SyntheticVerifier(p, 2), [16] * 6400)
    for position, rate in enumerate(rates(p, 15), start=1):
        survived = sum(length > position for length in found) / len(found)
        assert survived == pytest.approx(rate, abs=0.01)


def test_rounds_do_not_depend_on_those_before() -> None:
    found = lengths(SyntheticVerifier(solve_p(6.5), 3), [16] * 6400)
    mean = sum(found) / len(found)
    pairs = [(a - mean) * (b - mean) for a, b in pairwise(found)]
    variance = sum((length - mean) ** 2 for length in found) / len(found)
    assert abs(sum(pairs) / len(pairs)) < 0.05 * variance


def test_a_run_repeats_and_another_seed_differs() -> None:
    p = solve_p(6.5)
    first = lengths(SyntheticVerifier(p, 4), [16] * 50)
    assert lengths(SyntheticVerifier(p, 4), [16] * 50) == first
    assert lengths(SyntheticVerifier(p, 5), [16] * 50) != first


def test_a_narrower_run_is_the_same_cut_there() -> None:
    p = solve_p(6.5)
    wide = lengths(SyntheticVerifier(p, 6), [16] * 200)
    assert lengths(SyntheticVerifier(p, 6), [4] * 200) == [min(length, 4) for length in wide]


def test_rounds_without_a_draft_do_not_disturb_the_others() -> None:
    p = solve_p(6.5)
    wide = lengths(SyntheticVerifier(p, 7), [16] * 100)
    mixed = lengths(SyntheticVerifier(p, 7), [16, 1] * 50)
    assert mixed[::2] == wide[::2]
    assert mixed[1::2] == [1] * 50


@given(st.integers(1, 16), st.integers(0, 1000))
def test_every_kept_row_is_sampled_once_and_in_order(width: int, seed: int) -> None:
    rounds = Rounds(SyntheticVerifier(solve_p(6.5), seed))
    draft = chain(width - 1)
    verdict = rounds.run(draft)
    assert rounds.sampled == verdict.path == list(range(len(verdict.tokens)))
    assert rounds.emitted == verdict.tokens
    assert verdict.tokens[:-1] == draft.tokens[: len(verdict.tokens) - 1]


def test_the_token_after_the_last_survivor_is_not_the_draft() -> None:
    for drawn in (100, 0, 105):
        rounds = Rounds(SyntheticVerifier(0.5, 8), drawn)
        for _ in range(100):
            draft = Draft.chain([drawn] * 15)
            verdict = rounds.run(draft)
            if len(verdict.tokens) < 16:
                assert verdict.tokens[-1] != drawn
                assert verdict.tokens[-1] >= 0


def test_a_token_that_ends_the_text_ends_the_round() -> None:
    draft = Draft.chain([10, EOS, 12])
    verdict = Rounds(SyntheticVerifier(1.0, 9)).run(draft)
    assert verdict == Verdict([10, EOS], [0, 1], finished=True)


def test_tokens_that_end_the_text_can_be_avoided() -> None:
    def ends_text(token: int) -> bool:
        return token in (EOS, EOS - 1)

    rounds = Rounds(SyntheticVerifier(1.0, 10, ends_text=ends_text), drawn=EOS)
    assert rounds.run(Draft.chain([10, EOS, 12])) == Verdict([10, 5], [0, 1], finished=False)
    assert rounds.run(Draft.chain([10, 11])).tokens == [10, 11, 5]


def test_in_a_tree_each_sibling_has_its_own_chance() -> None:
    draft = Draft([1, 2, 3], [ANCHOR, ANCHOR, 1])
    rounds = Rounds(SyntheticVerifier(0.5, 11))
    first = [rounds.run(draft).tokens[0] for _ in range(6400)]
    assert first.count(1) / 6400 == pytest.approx(0.5, abs=0.02)
    assert first.count(2) / 6400 == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("p", "length"), [(0.0, 1), (1.0, 16)])
def test_a_real_engine_accepts_what_it_is_told(p: float, length: int) -> None:
    with open_engine() as engine:
        engine.verifier = SyntheticVerifier(p, 12, ends_text=engine.target.vocabulary.ends_text)
        prompt = engine.target.vocabulary.tokenize("def f(x):")
        sequence = engine.begin(request(prompt, 16, 1 + 8 * length))
        engine.run([sequence])
    assert sequence.stats.accepted_lengths == {length: 8}
