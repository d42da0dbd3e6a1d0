"""Drawn acceptance: as long as asked for, the same truth for all drafts, at the price of the real
one."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.bench.synthetic.acceptance import Synthetic, SyntheticDrafter
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Chain, DraftShape, Tree
from dflash_local.engine.engine import Engine
from dflash_local.engine.verify import Verdict
from dflash_local.errors import InputError
from pair_engine import open_engine, request

EOS = 7
N_VOCAB = 4096
OWN = 3.74
"""Tokens a round of the passages recorded, all drawn alike."""


def proposal(n: int = 15, k: int = 8) -> Draft:
    """What a drafter of random weights gives: tokens 100 + 8 i + r, and log-probabilities that say
    nothing."""
    ids = (100 + 8 * np.arange(n)[:, None] + np.arange(k)).astype(np.int32)
    logprobs = np.full((n, k), -9.0, np.float32)
    return Draft.chain(ids[:, 0].tolist(), logprobs[:, 0].tolist(), Candidates(ids, logprobs))


def shaped(draft: Draft, width: int, *, tree: bool) -> Draft:
    n = width - 1
    if not tree:
        return Chain(n).cut(draft, N_VOCAB, n, None)
    return Tree(n, 65).cut(draft, N_VOCAB, n, None)


def play(synthetic: Synthetic, draft: Draft, drawn: int = 1000) -> Verdict:
    return synthetic.verify(draft, lambda _row: drawn, lambda token: token == EOS)


def lengths(
    synthetic: Synthetic, n: int, *, width: int = 16, tree: bool = False, k: int = 8
) -> list[int]:
    """Of n rounds."""
    found = []
    for _ in range(n):
        draft = shaped(synthetic.judge(proposal(k=k)), width, tree=tree)
        found.append(len(play(synthetic, draft).tokens))
    return found


def synthetic(length: float = OWN, seed: int = 0) -> Synthetic:
    return Synthetic(RecordedDrafts.shipped(), length, seed)


# What is recorded


def test_the_record_holds_blocks_with_falling_candidates() -> None:
    known = RecordedDrafts.shipped()
    assert known.logprobs.shape == (*known.ranks.shape, 8)
    assert (np.diff(known.logprobs, axis=-1) <= 1e-6).all()
    assert (known.logprobs <= 0).all() and (known.ranks <= 8).all()
    assert np.exp(known.logprobs).sum(axis=-1).max() < 1.03


def test_its_confidence_is_what_it_is_worth() -> None:
    known = RecordedDrafts.shipped()
    said = np.exp(known.logprobs[:, :, 0, 0])
    assert (known.ranks[:, :, 0] == 0).mean() == pytest.approx(said.mean(), abs=0.1)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    known = RecordedDrafts.shipped()
    known.write(tmp_path / "again.npz")
    again = RecordedDrafts.read(tmp_path / "again.npz")
    assert (again.ranks == known.ranks).all()
    assert np.abs(np.exp(again.logprobs) - np.exp(known.logprobs)).max() < 0.01


@given(st.floats(2.5, 8.0))
def test_passages_are_drawn_so_that_chains_have_the_length(length: float) -> None:
    known = RecordedDrafts.shipped()
    assert 1 + sum(known.rates(length, 15)) == pytest.approx(length, abs=1e-6)
    assert known.weights(length).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("length", [0.99, 16.01, 0.0, -3.0, float("nan"), float("inf")])
def test_a_length_that_no_passage_has_is_refused(length: float) -> None:
    with pytest.raises(InputError, match=r"expected 1\.\d\d to \d+\.\d\d"):
        RecordedDrafts.shipped().weights(length)


def test_rates_of_fewer_drafts_are_no_higher() -> None:
    known = RecordedDrafts.shipped()
    for n_drafts in (1, 7, 15):
        found = known.rates(4.0, n_drafts)
        assert len(found) == n_drafts
        assert all(a >= b for a, b in pairwise(found))


# What becomes of drafts


@pytest.mark.parametrize("length", [2.8, OWN, 6.5])
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
        drafts = [drawn.judge(proposal()) for _ in range(4)]
        found += [len(play(drawn, draft).tokens) for draft in drafts]
    assert np.mean(found) == pytest.approx(OWN, rel=0.06)


def test_a_draft_that_is_not_checked_gives_one_token() -> None:
    drawn = synthetic()
    assert {len(play(drawn, drawn.judge(proposal()).clip(0)).tokens) for _ in range(40)} == {1}


@given(st.integers(2, 40), st.integers(0, 1000), st.booleans())
def test_every_kept_row_is_sampled_once_and_in_order(width: int, seed: int, tree: bool) -> None:
    drawn = synthetic(seed=seed)
    draft = shaped(drawn.judge(proposal()), width if tree else min(width, 16), tree=tree)
    sampled: list[int] = []
    emitted: list[int] = []

    def sample(row: int) -> int:
        sampled.append(row)
        return 1000

    def stop(token: int) -> bool:
        emitted.append(token)
        return False

    verdict = drawn.verify(draft, sample, stop)
    assert sampled == verdict.path and emitted == verdict.tokens
    assert len(verdict.tokens) == len(verdict.path)
    kept = [draft.tokens[row - 1] for row in verdict.path[1:]]
    assert verdict.tokens[:-1] == kept


def test_what_was_no_candidate_is_none_here() -> None:
    """Whatever the target draws, also a token that was drafted."""
    drawn = synthetic()
    for _ in range(300):
        draft = drawn.judge(proposal())
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
    drawn = Synthetic(known, OWN, 0, usable=usable)
    ids = np.full((15, 1), EOS, np.int32)
    ends = Draft.chain([EOS] * 15, None, Candidates(ids, np.zeros((15, 1), np.float32)))
    assert play(drawn, drawn.judge(ends), drawn=EOS) == Verdict([EOS - 2], [0], finished=False)


def test_the_end_of_an_answer_ends_the_round() -> None:
    drawn = synthetic(8.0)
    for _ in range(20):
        draft = drawn.judge(proposal())
        verdict = drawn.verify(draft, lambda _row: 1000, lambda _token: True)
        assert verdict.finished and verdict.path == [0]


@pytest.mark.parametrize(("shape", "width"), [("chain", 16), ("tree", 16), ("tree", 32)])
def test_a_real_engine_accepts_what_it_is_told(shape: DraftShape, width: int) -> None:
    with open_engine(n_branches=33 if shape == "tree" else 1) as engine:
        vocabulary = engine.target.vocabulary
        drawn = Synthetic(
            RecordedDrafts.shipped(), 5.0, 3, usable=lambda token: not vocabulary.ends_text(token)
        )
        found: list[int] = []

        def verify(draft: Draft, *arguments: Any) -> Verdict:
            verdict = drawn.verify(draft, *arguments)
            found.append(len(verdict.tokens))
            return verdict

        drafter = SyntheticDrafter(engine.drafter, drawn)
        engine = Engine(engine.target, drafter, verify=verify)
        asked = request(vocabulary.tokenize("def f(x):"), width, 97, shape=shape)
        sequence = engine.begin(asked)
        engine.run([sequence])
    assert len(sequence.tokens) == 1 + sum(found) == 97
    expected = lengths(synthetic(5.0, seed=3), len(found), width=width, tree=shape == "tree")
    # Where the end of the answer is near, drafts are cut there.
    n = sum(1 for total in accumulate(found) if total < 80)
    assert found[:n] == expected[:n]
