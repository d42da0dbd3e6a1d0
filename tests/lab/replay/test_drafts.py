"""Drafts that hold the given text at the recorded rank."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Chain, Tree
from dflash_local.engine.accept import accept
from lab.replay.drafts import ReplayedDrafts, Walk, with_rank

N_VOCAB = 9000
OWN_LENGTH = 3.74
"""Tokens a round of the recorded passages, each drawn as often as the others."""
TEXT = [1000 + i % 3000 for i in range(9000)]


def proposal(n: int = 15, k: int = 8) -> Draft:
    """The draft of a drafter of random weights: tokens 100 + 8 i + r, and log-probabilities that
    say nothing."""
    ids = (100 + 8 * np.arange(n)[:, None] + np.arange(k)).astype(np.int32)
    logprobs = np.full((n, k), -9.0, np.float32)
    return Draft.chain(ids[:, 0].tolist(), logprobs[:, 0].tolist(), Candidates(ids, logprobs))


def rounds(
    drafts: ReplayedDrafts, n_tokens: int = 6000, width: int = 16, *, tree: bool = False, k: int = 8
) -> Iterator[int]:
    """Tokens of each round through the text, as the engine drafts and accepts."""
    shape = Tree(width - 1, 65) if tree else Chain(width - 1)
    at, walk = 1, Walk(0)
    while at < n_tokens:
        marked = drafts.mark(proposal(k=k), TEXT, at, walk)
        draft = shape.cut(marked, N_VOCAB, width - 1, None, lambda known: None)
        answer = iter(TEXT[at:])
        n = len(accept(draft, lambda _row, given=answer: next(given), lambda _token: False).tokens)
        yield n
        at += n


@given(
    row=st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True),
    rank=st.integers(0, 9),
    token=st.integers(0, 20),
)
def test_candidates_stay_different_and_hold_the_token_at_its_rank(
    row: list[int], rank: int, token: int
) -> None:
    found = with_rank(row, rank, token)
    assert len(found) == len(set(found)) == len(row)
    assert (found.index(token) if token in found else None) == (rank if rank < len(row) else None)


def test_an_answer_is_as_hard_whatever_was_drafted_before() -> None:
    drafts = ReplayedDrafts(OWN_LENGTH, seed=0)
    first = list(rounds(drafts, 1500))
    assert sum(rounds(drafts, width=32, tree=True)) > 1500
    assert list(rounds(drafts, 1500)) == first
    assert list(rounds(ReplayedDrafts(OWN_LENGTH, seed=1), 1500)) != first
    one, other = drafts.begin(100), drafts.begin(3)
    assert (one.number, other.number, drafts.begin(3).number) == (0, 4, 5)


@pytest.mark.parametrize("length", [2.8, OWN_LENGTH, 6.5, 12])
def test_rounds_of_chains_are_as_long_as_asked_for(length: float) -> None:
    assert np.mean(list(rounds(ReplayedDrafts(length, seed=0)))) == pytest.approx(length, rel=0.05)


def test_trees_gain_what_they_gain_of_the_shipped_pair() -> None:
    """15 and 31 nodes give 1.25 and 1.35 times the tokens of a whole chain there."""
    drafts = ReplayedDrafts(OWN_LENGTH, seed=0)
    chain = np.mean(list(rounds(drafts)))
    assert 1.18 < np.mean(list(rounds(drafts, tree=True))) / chain < 1.32
    assert 1.26 < np.mean(list(rounds(drafts, width=32, tree=True))) / chain < 1.45


def test_all_shapes_meet_the_same_truth() -> None:
    """At any place a tree that holds the chain accepts no less, and a cut chain as much as fits."""
    for seed in range(40):
        drafts = ReplayedDrafts(OWN_LENGTH, seed)
        chain = next(rounds(drafts))
        assert next(rounds(drafts, width=4)) == min(chain, 4)
        assert next(rounds(drafts, width=64, tree=True)) >= min(chain, 4)
        assert next(rounds(drafts, k=1)) == chain


def test_the_end_of_a_text_needs_no_more_candidates() -> None:
    marked = ReplayedDrafts(OWN_LENGTH, seed=0).mark(proposal(), [0, 1, 2], 1, Walk(0))
    assert len(marked) == len(proposal())
    assert marked.tokens[2:] == proposal().tokens[2:]
