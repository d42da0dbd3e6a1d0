"""Candidates that hold the given text at the recorded rank."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.bench.replay.acceptance import ReplayedDrafts, with_rank
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from synthetic_rounds import proposal, shaped

SHIPPED = RecordedDrafts.shipped()


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


def test_a_place_of_a_text_is_as_hard_whatever_was_drafted_before() -> None:
    drafts = ReplayedDrafts(SHIPPED, 3.74, seed=0)
    text = list(range(1000, 3000))
    at_once = drafts.mark(proposal(), text[7:], 7)
    for place in range(300):
        drafts.mark(proposal(), text[place:], place)
    assert drafts.mark(proposal(), text[7:], 7).tokens == at_once.tokens


def test_chains_are_accepted_as_recorded() -> None:
    drafts = ReplayedDrafts(SHIPPED, 3.74, seed=0)
    text = [1000 + i % 3000 for i in range(8000)]
    at = n_rounds = 0
    while at < 6000:
        marked = shaped(drafts.mark(proposal(), text[at:], at), 16, tree=False)
        agreed = np.array(marked.tokens) == text[at : at + len(marked)]
        at += 1 + int(np.cumprod(agreed).sum())
        n_rounds += 1
    assert 3.4 < at / n_rounds < 4.1


def test_answers_begin_one_after_the_other() -> None:
    drafts = ReplayedDrafts(SHIPPED, 3.74, seed=0)
    assert [drafts.begin(10), drafts.begin(5), drafts.begin(1)] == [0, 10, 15]
    drafts.restart(100)
    assert drafts.begin(3) == 100


def test_the_end_of_a_text_needs_no_more_candidates() -> None:
    drafts = ReplayedDrafts(SHIPPED, 3.74, seed=0)
    marked = drafts.mark(proposal(), [1, 2], 0)
    assert len(marked) == len(proposal())
    assert marked.tokens[2:] == proposal().tokens[2:]
