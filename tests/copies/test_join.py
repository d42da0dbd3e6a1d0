"""A drafter's nodes and copies in one draft."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.copies.chances import AGREES, DIFFERS, CopyChances, CopyPrior, drafter_thinks
from dflash_local.copies.copier import Copy
from dflash_local.copies.join import copy_alone, joined, judged_by_drafter
from dflash_local.draft.draft import ANCHOR, Draft

chance = st.floats(0.0, 1.0)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(0, 12))
    parents = [draw(st.integers(ANCHOR, node - 1)) for node in range(n)]
    tokens = [draw(st.integers(0, 3)) for _ in range(n)]
    return Draft(tokens, parents, [-draw(st.floats(0.0, 9.0)) for _ in range(n)])


@st.composite
def copies(draw: st.DrawFn) -> list[Copy]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
        chances = [draw(chance) for _ in tokens]
        found.append(Copy(tokens, [0] * len(tokens), chances))
    return found


@given(trees(), copies(), st.integers(1, 40), st.integers(1, 8))
@settings(deadline=None)
def test_a_joined_draft_is_a_draft(
    own: Draft, offered: list[Copy], n_nodes: int, n_leaves: int
) -> None:
    draft, chances = joined(own, own.chances, offered, n_nodes=n_nodes, n_leaves=n_leaves)
    assert len(draft) == len(chances) <= n_nodes
    assert len(draft.leaves) <= n_leaves
    assert chances == sorted(chances, reverse=True)
    edges = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(set(edges)) == len(edges)  # no equal siblings
    if n_leaves == 1:
        assert draft.is_chain
    for parent in {*draft.parents}:
        children = [c for p, c in zip(draft.parents, chances, strict=True) if p == parent]
        before = chances[parent] if parent != ANCHOR else 1.0
        assert sum(children) <= before + 1e-9
    paths = {tuple(own.tokens[n] for n in own.path(node)) for node in range(len(own))}
    for node, copied in enumerate(draft.copied):
        path = tuple(draft.tokens[n] for n in draft.path(node))
        assert copied == (path not in paths)
        if copied:
            assert any(tuple(copy.tokens[: len(path)]) == path for copy in offered)


def sure(tokens: list[int], chance: float = 0.9) -> Copy:
    return Copy(tokens, [9] * len(tokens), [chance] * len(tokens))


def test_the_better_chain_wins_and_a_copy_takes_over_where_the_drafter_ends() -> None:
    own = Draft.chain([1, 2, 3], [math.log(0.8)] * 3)
    longer, _ = joined(own, own.chances, [sure([1, 2, 3, 4, 5])], n_nodes=15, n_leaves=1)
    assert longer.tokens == [1, 2, 3, 4, 5]
    assert longer.copied == [False, False, False, True, True]
    assert longer.candidates is not None and longer.candidates.ids.tolist() == [[1], [2], [3]]
    doubtful = sure([7, 8, 9], 0.3)
    kept, _ = joined(own, own.chances, [doubtful], n_nodes=15, n_leaves=1)
    assert kept.tokens == [1, 2, 3]
    branched, _ = joined(own, own.chances, [doubtful], n_nodes=15, n_leaves=4)
    assert set(branched.tokens) == {1, 2, 3, 7, 8, 9}


def test_what_both_propose_is_likelier() -> None:
    own = Draft.chain([1, 2], [math.log(0.5)] * 2)
    chances = CopyChances(CopyPrior())
    agreed, differing = judged_by_drafter(own, [sure([1, 2, 3]), sure([1, 9, 3])], chances)
    assert agreed.kinds == [drafter_thinks(9, AGREES)] * 2 + [9]
    assert differing.kinds == [drafter_thinks(9, AGREES), drafter_thinks(9, DIFFERS), 9]
    _, both = joined(own, own.chances, [agreed], n_nodes=8, n_leaves=1)
    assert both[0] > max(0.5, chances.each([9])[0])


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_copy_alone_is_the_one_that_promises_most(n: int) -> None:
    assert copy_alone([])[0].tokens == []
    draft, chances = copy_alone([sure([4] * 3, 0.5), sure([5] * (n + 1), 0.9)])
    assert draft.is_copy and draft.tokens == [5] * (n + 1)
    assert chances[0] == 0.9
