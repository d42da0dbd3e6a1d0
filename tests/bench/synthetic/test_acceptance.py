"""Synthetic acceptance: rounds as long as asked for, and the same truth for all drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.bench.synthetic.acceptance import SyntheticAcceptance
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.engine.accept import Verdict
from synthetic_rounds import EOS, OWN_LENGTH, lengths, play, proposal, shaped, synthetic


@pytest.mark.parametrize("length", [2.8, OWN_LENGTH, 6.5])
def test_rounds_of_chains_are_as_long_as_asked_for(length: float) -> None:
    found = lengths(synthetic(length), 3000)
    assert np.mean(found) == pytest.approx(length, rel=0.05)


def test_trees_gain_what_they_gain_of_the_shipped_pair() -> None:
    """15 and 31 nodes give 1.25 and 1.35 times the tokens of a whole chain there."""
    chain = np.mean(lengths(synthetic(), 1000))
    tree = np.mean(lengths(synthetic(), 1000, tree=True))
    wide = np.mean(lengths(synthetic(), 800, width=32, tree=True))
    assert 1.18 < tree / chain < 1.32
    assert 1.26 < wide / chain < 1.45


def test_all_shapes_meet_the_same_truth() -> None:
    """At any place a tree that holds the chain accepts no less, and a cut chain as much as fits."""
    for seed in range(40):
        (chain,) = lengths(synthetic(seed=seed), 1)
        (short,) = lengths(synthetic(seed=seed), 1, width=4)
        (wide,) = lengths(synthetic(seed=seed), 1, width=64, tree=True)
        (single,) = lengths(synthetic(seed=seed), 1, k=1)
        assert short == min(chain, 4)
        assert wide >= min(chain, 4)
        assert single == chain


def test_answers_that_begin_alike_are_alike() -> None:
    drawn = synthetic()
    first = lengths(drawn, 50)
    drawn.restart()
    assert lengths(drawn, 50) == first
    drawn.restart(96)
    assert lengths(drawn, 50) != first
    assert lengths(synthetic(seed=1), 50) != first


def test_several_answers_walk_side_by_side() -> None:
    drawn = synthetic()
    found: list[int] = []
    for _ in range(500):
        drafts = [drawn.mark(proposal()) for _ in range(4)]
        found += [len(play(drawn, draft).tokens) for draft in drafts]
    assert np.mean(found) == pytest.approx(OWN_LENGTH, rel=0.06)


def test_a_draft_that_is_not_checked_gives_one_token() -> None:
    drawn = synthetic()
    assert {len(play(drawn, drawn.mark(proposal()).clip(0)).tokens) for _ in range(40)} == {1}


@given(st.integers(2, 40), st.integers(0, 1000), st.booleans())
def test_every_kept_row_is_sampled_once_and_in_order(width: int, seed: int, tree: bool) -> None:
    drawn = synthetic(seed=seed)
    draft = shaped(drawn.mark(proposal()), width if tree else min(width, 16), tree=tree)
    sampled: list[int] = []
    emitted: list[int] = []

    def sample(row: int) -> int:
        sampled.append(row)
        return 1000

    def stop(token: int) -> bool:
        emitted.append(token)
        return False

    verdict = drawn.accept(draft, sample, stop)
    assert sampled == verdict.path and emitted == verdict.tokens
    assert len(verdict.tokens) == len(verdict.path)
    kept = [draft.tokens[row - 1] for row in verdict.path[1:]]
    assert verdict.tokens[:-1] == kept


def test_what_was_no_candidate_is_none_here() -> None:
    """Whatever the target draws, also a token that was drafted."""
    drawn = synthetic()
    for _ in range(300):
        draft = drawn.mark(proposal())
        verdict = play(drawn, draft, drawn=draft.tokens[0])
        at = len(verdict.tokens) - 1
        if at < 15 and draft.candidates is not None:
            row = draft.candidates.ids[at].tolist()
            assert verdict.tokens[-1] not in row[:1]
            assert verdict.tokens[-1] >= 0


def test_tokens_that_end_the_text_never_come_true() -> None:
    def usable(token: int) -> bool:
        return token not in (EOS, EOS - 1)

    known = RecordedDrafts.shipped()
    drawn = SyntheticAcceptance(known, OWN_LENGTH, 0, usable=usable)
    ids = np.full((15, 1), EOS, np.int32)
    ends = Draft.chain([EOS] * 15, None, Candidates(ids, np.zeros((15, 1), np.float32)))
    assert play(drawn, drawn.mark(ends), drawn=EOS) == Verdict([EOS - 2], [0])


def test_the_end_of_an_answer_ends_the_round() -> None:
    drawn = synthetic(8.0)
    for _ in range(20):
        draft = drawn.mark(proposal())
        verdict = drawn.accept(draft, lambda _row: 1000, lambda _token: True)
        assert verdict.path == [0] and len(verdict.tokens) == 1
