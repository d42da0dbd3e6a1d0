"""Sample and match emits the tokens of plain decoding, whatever is drafted."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.engine.accept import Verdict, accept

FEW = st.integers(0, 3)  # few token ids, so that drafts are often right and siblings often equal


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    tokens = draw(st.lists(FEW, max_size=12))
    parents = [draw(st.integers(ANCHOR, node - 1)) for node in range(len(tokens))]
    return Draft(tokens, parents)


def prefix_of(draft: Draft, row: int) -> tuple[int, ...]:
    """The drafted tokens from the anchor to this row."""
    tokens: list[int] = []
    node = row - 1
    while node != ANCHOR:
        tokens.append(draft.tokens[node])
        node = draft.parents[node]
    return tuple(reversed(tokens))


def target_of(seed: int) -> Callable[[tuple[int, ...]], int]:
    """A target that is a function of the prefix, as a greedy one is."""
    return lambda prefix: hash((seed, prefix)) % 4


def run(draft: Draft, seed: int, stop_token: int | None) -> tuple[Verdict, list[int]]:
    target = target_of(seed)
    rows: list[int] = []

    def sample(row: int) -> int:
        rows.append(row)
        return target(prefix_of(draft, row))

    return accept(draft, sample, lambda token: token == stop_token), rows


@given(drafts(), st.integers(), st.none() | FEW)
def test_emits_what_plain_decoding_emits(draft: Draft, seed: int, stop_token: int | None) -> None:
    verdict, _ = run(draft, seed, stop_token)
    target = target_of(seed)
    plain: list[int] = []
    while len(plain) < len(verdict.tokens):
        assert stop_token not in plain
        plain.append(target(tuple(plain)))
    assert verdict.tokens == plain


@given(drafts(), st.integers(), st.none() | FEW)
def test_path_is_the_anchor_and_the_accepted_nodes(
    draft: Draft, seed: int, stop_token: int | None
) -> None:
    verdict, sampled = run(draft, seed, stop_token)
    assert verdict.path[0] == 0
    assert len(verdict.path) == len(verdict.tokens)
    assert sampled == verdict.path  # one draw per emitted token, in order
    for i, row in enumerate(verdict.path[1:]):
        assert draft.parents[row - 1] + 1 == verdict.path[i]
        assert draft.tokens[row - 1] == verdict.tokens[i]


@given(drafts(), st.integers())
def test_accepts_as_far_as_the_draft_goes(draft: Draft, seed: int) -> None:
    verdict, _ = run(draft, seed, None)
    edges = zip(draft.parents, draft.tokens, strict=True)
    assert (verdict.path[-1] - 1, verdict.tokens[-1]) not in set(edges)


def scripted(*tokens: int) -> Callable[[int], int]:
    left = iter(tokens)
    return lambda row: next(left)


def never(token: int) -> bool:
    return False


def test_stop_inside_a_right_chain_leaves_its_row_out() -> None:
    verdict = accept(Draft.chain([5, 6, 7]), scripted(5, 6), lambda token: token == 6)
    assert verdict == Verdict([5, 6], [0, 1])


def test_the_first_of_equal_siblings_counts() -> None:
    draft = Draft([5, 5, 6], [ANCHOR, ANCHOR, 1])
    assert accept(draft, scripted(5, 6), never).path == [0, 1]


@given(drafts(), st.integers(-2, 14))
def test_clip_keeps_the_first_nodes(draft: Draft, n: int) -> None:
    clipped = draft.clip(n)
    assert len(clipped) == min(max(n, 0), len(draft))
    assert clipped.tokens == draft.tokens[: len(clipped)]
    assert clipped.parents == draft.parents[: len(clipped)]


@given(drafts(), st.integers(0, 4))
def test_valid_prefix_keeps_whole_valid_branches(draft: Draft, n_vocab: int) -> None:
    valid = draft.valid_prefix(n_vocab)
    kept = [prefix_of(valid, row) for row in range(1, len(valid) + 1)]
    every = [prefix_of(draft, row) for row in range(1, len(draft) + 1)]
    assert kept == [tokens for tokens in every if max(tokens) < n_vocab]
    assert len(valid.logprobs) == len(valid)


def test_a_draft_that_is_no_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="parent 1"):
        Draft([1, 2], [ANCHOR, 1])
    with pytest.raises(ValueError, match="counts must be equal"):
        Draft([1, 2], [ANCHOR])
    with pytest.raises(ValueError, match=r"\[positions, k\]"):
        Candidates(np.zeros((2, 3), np.int32), np.zeros((2, 2), np.float32))
