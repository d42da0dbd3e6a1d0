"""The tree of n nodes is the one with the greatest expected accepted length there is."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.draft.draft import ANCHOR, Candidates
from dflash_local.draft.tree import grow
from odd_drafts import texts

N_VOCAB = 100

Levels = list[list[float]]


def candidates(levels: Levels, ids: list[list[int]] | None = None) -> Candidates:
    """Distributions, a row of probabilities for each position; token j + 10 i without `ids`."""
    n, k = len(levels), len(levels[0])
    tokens = ids or [[10 * i + j for j in range(k)] for i in range(n)]
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.asarray(levels, np.float32))
    return Candidates(np.asarray(tokens, np.int32), logprobs)


def shares(k: int) -> st.SearchStrategy[list[float]]:
    """Of `k` tokens, with something left for the others."""
    weights = st.lists(st.integers(1, 40), min_size=k + 1, max_size=k + 1)
    return weights.map(lambda row: [weight / sum(row) for weight in row[:k]])


@st.composite
def distributions(draw: st.DrawFn) -> Levels:
    n, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return [sorted(draw(shares(k)), reverse=True) for _ in range(n)]


@st.composite
def dependent(draw: st.DrawFn) -> tuple[Levels, list[Levels] | None]:
    """Distributions, and in each position those after each candidate of the one before, or None:
    then these are all alike. After the first candidate they are those of the position."""
    levels = draw(distributions())
    if draw(st.booleans()):
        return levels, None
    k = len(levels[0])
    return levels, [[row, *(draw(shares(k)) for _ in range(k - 1))] for row in levels]


def every_path(steps: list[Levels]) -> list[float]:
    """The probability of every path there is, the likeliest first."""
    paths, found = [(1.0, 0)], list[float]()
    for after in steps:
        paths = [(p * share, b) for p, before in paths for b, share in enumerate(after[before])]
        found += [p for p, _ in paths]
    return sorted(found, reverse=True)


@given(dependent(), st.integers(0, 40))
def test_no_tree_of_as_many_nodes_is_expected_to_be_accepted_further(
    distributions: tuple[Levels, list[Levels] | None], n: int
) -> None:
    levels, steps = distributions
    source = candidates(levels)
    if steps:
        source = replace(source, steps=np.log(np.array(steps, np.float32)))
    draft = grow(source, n, N_VOCAB)
    # Any tree is a set of paths, so none has more than the n likeliest.
    best = every_path(steps or [[row] * len(row) for row in levels])[:n]
    assert len(draft) == len(best)
    assert draft.chances == pytest.approx(best, rel=1e-4)
    assert len(set(texts(draft))) == len(draft)


@given(distributions(), st.integers(0, 40), st.integers(0, 40))
def test_a_smaller_tree_begins_a_larger_one(levels: Levels, n: int, m: int) -> None:
    small, large = sorted((n, m))
    source = candidates(levels)
    draft = grow(source, small, N_VOCAB)
    assert grow(source, large, N_VOCAB).clip(len(draft)).tokens == draft.tokens


@given(distributions(), st.integers(0, 40), st.integers(0, 4), st.integers(0, 4))
def test_bounds_hold(levels: Levels, n: int, leaves: int, depth: int) -> None:
    draft = grow(candidates(levels), n, N_VOCAB, max_leaves=leaves, max_depth=depth)
    assert len(draft) <= n
    assert len(draft.leaves) <= leaves
    assert max(draft.depths, default=0) <= depth


@given(distributions(), st.integers(0, 10))
def test_one_leaf_is_the_chain_of_the_best_tokens(levels: Levels, n: int) -> None:
    draft = grow(candidates(levels), n, N_VOCAB, max_leaves=1)
    assert draft.is_chain
    assert draft.tokens == [10 * i for i in range(min(n, len(levels)))]


def test_of_equals_the_shallower_and_then_the_first() -> None:
    draft = grow(candidates([[0.5, 0.5], [1.0, 0.5]]), 6, N_VOCAB)
    assert draft.tokens == [0, 1, 10, 10, 11, 11]
    assert draft.parents == [ANCHOR, ANCHOR, 0, 1, 0, 1]


def test_tokens_that_cannot_be_are_left_out() -> None:
    source = candidates(
        [[0.4, 0.3, 0.2, 0.1], [0.7, 0.3, 0.0, 0.0]], [[-1, 7, 7, N_VOCAB], [3, 4, 5, 6]]
    )
    draft = grow(source, 9, N_VOCAB)
    assert draft.tokens == [7, 3, 4]
    assert draft.parents == [ANCHOR, 0, 0]


def test_numbers_that_are_none_end_a_position() -> None:
    source = candidates([[0.6, math.nan], [math.nan, math.nan], [0.9, 0.1]])
    assert grow(source, 9, N_VOCAB).tokens == [0]


def test_a_position_without_candidates_ends_the_tree() -> None:
    assert len(grow(candidates([[0.5]], [[-1]]), 5, N_VOCAB)) == 0
    none = Candidates(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32))
    assert len(grow(none, 5, N_VOCAB)) == 0
    no_steps = np.zeros((2, 0, 0), np.float32)
    none = Candidates(np.zeros((2, 0), np.int32), np.zeros((2, 0), np.float32), steps=no_steps)
    assert len(grow(none, 5, N_VOCAB)) == 0
