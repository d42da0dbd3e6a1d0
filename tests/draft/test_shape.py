"""The verified part of a draft stays within its bounds, and within the end of the answer."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.draft.shape import Chain, Tree, allowed
from dflash_local.errors import InputError

N_VOCAB = 4


def as_they_are(candidates: Candidates) -> Candidates:
    return candidates


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    tokens = draw(st.lists(st.integers(-1, N_VOCAB), max_size=14))
    return Draft(tokens, [draw(st.integers(ANCHOR, node - 1)) for node in range(len(tokens))])


def texts(draft: Draft) -> list[tuple[int, ...]]:
    """Of each node, the tokens from the anchor to it."""
    return [tuple(draft.tokens[step] for step in draft.path(node)) for node in range(len(draft))]


@given(drafts(), st.integers(0, 14), st.integers(0, 6), st.integers(1, 6))
def test_a_tree_is_cut_to_its_bounds(draft: Draft, nodes: int, depth: int, leaves: int) -> None:
    tree = Tree(nodes, leaves + 1).cut(draft, N_VOCAB, nodes, depth + 1, as_they_are)
    found = texts(tree)
    assert len(tree) <= nodes
    assert len(tree.leaves) <= leaves
    assert max(tree.depths, default=0) <= depth
    assert len(set(found)) == len(found)  # no two siblings are equal
    assert all(0 <= token < N_VOCAB for token in tree.tokens)
    assert set(found) <= set(texts(draft))


@given(drafts())
def test_what_is_within_its_bounds_is_left_as_it_is(draft: Draft) -> None:
    shape = Tree(14, 15)
    once = shape.cut(draft, N_VOCAB, 14, None, as_they_are)
    again = shape.cut(once, N_VOCAB, 14, None, as_they_are)
    assert (again.tokens, again.parents) == (once.tokens, once.parents)


@given(drafts(), st.integers(0, N_VOCAB))
def test_what_is_refused_goes_with_all_that_follows_it(draft: Draft, refused: int) -> None:
    def n_valid(tokens: Sequence[int]) -> int:
        """Refuses one token, and anything after two equal ones."""
        for i, token in enumerate(tokens):
            if token == refused or (i >= 2 and tokens[i - 1] == tokens[i - 2]):
                return i
        return len(tokens)

    kept = texts(allowed(draft, n_valid))
    assert kept == [text for text in texts(draft) if n_valid(text) == len(text)]


def test_a_chain_is_expected_where_nothing_forks() -> None:
    assert Chain(15).cut(
        Draft.chain([1, 2, N_VOCAB, 3]), N_VOCAB, 15, None, as_they_are
    ).tokens == [1, 2]
    with pytest.raises(InputError, match="verifies chains"):
        Chain(15).cut(Draft([1, 2], [ANCHOR, ANCHOR]), N_VOCAB, 15, None, as_they_are)


def test_a_chain_ends_with_its_answer_where_fewer_rows_cost_nothing() -> None:
    """On a GPU they cost a graph: then it only ends before the last token, which needs no draft."""
    assert [Chain(7).limit(7, left) for left in (None, 9, 8, 3, 1)] == [7, 7, 7, 2, 0]
    whole = Chain(7, few_counts=True)
    assert [whole.limit(7, left) for left in (None, 9, 8, 3, 2, 1)] == [7, 7, 7, 7, 7, 0]
    assert whole.limit(4, 3) == 4  # the room in the caches
