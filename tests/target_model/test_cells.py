"""After a pass over a tree, what each branch has is accepted, or told to be dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.fit.options import MAX_IDS
from dflash_local.target_model.cells import branches_of_each, ids_of, lines_of, n_on_path


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(1, 12))
    return Draft(list(range(n)), [draw(st.integers(ANCHOR, node - 1)) for node in range(n)])


@st.composite
def forked(draw: st.DrawFn) -> tuple[Draft, int]:
    """A draft, and branches enough for its leaves or for its rows."""
    draft = draw(drafts())
    return draft, draw(st.integers(len(draft.leaves) + 1, len(draft) + 3))


def path_to(draft: Draft, node: int) -> list[int]:
    """Rows from the anchor to a node."""
    return [0, *(1 + step for step in draft.path(node))]


@given(forked())
def test_a_row_sees_its_ancestors_and_no_other_row(case: tuple[Draft, int]) -> None:
    draft, n_branches = case
    rows = lines_of(draft.parents, n_branches)
    for node in range(len(draft)):
        row = node + 1
        seen = [other for other in range(row + 1) if rows[row][0] in rows[other]]
        assert seen == path_to(draft, node)


@given(drafts(), drafts())
def test_trees_of_as_many_rows_have_the_same_first_branches(one: Draft, other: Draft) -> None:
    """So that llama.cpp keeps its graph."""
    n = min(len(one), len(other))
    firsts = [[row[0] for row in lines_of(draft.clip(n).parents, n + 1)] for draft in (one, other)]
    assert firsts == [list(range(n + 1))] * 2


@given(forked(), st.data())
def test_what_is_common_with_the_accepted_path(
    case: tuple[Draft, int], data: st.DataObject
) -> None:
    draft, n_branches = case
    rows = lines_of(draft.parents, n_branches)
    end = data.draw(st.integers(ANCHOR, len(draft) - 1))
    path = path_to(draft, end)
    kept, held = n_on_path(rows, path)
    assert len(kept) == len(held) == len(rows[0]) <= n_branches
    for branch in range(len(kept)):
        has = [row for row in range(len(rows)) if branch in rows[row]]
        assert len(has) == held[branch]
        assert has[: kept[branch]] == path[: kept[branch]]
        assert not set(has[kept[branch] :]) & set(path)
    assert held[0] == kept[0] == 1  # the first branch has the anchor, and gets what is accepted
    source = rows[path[-1]][0]
    assert kept[source] == len(path)


def test_more_leaves_than_branches_are_refused() -> None:
    with pytest.raises(ValueError, match="a tree of 3 leaves; with 3 branches it can have 2"):
        lines_of([ANCHOR, ANCHOR, ANCHOR], 3)


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_sequence_has_ids_of_its_own(n_seq: int, n_branches: int) -> None:
    ids = ids_of(n_seq, n_branches)
    assert [of_sequence[0] for of_sequence in ids] == list(range(n_seq))
    assert sorted(id_ for of_sequence in ids for id_ in of_sequence) == list(
        range(n_seq * n_branches)
    )


@given(st.integers(1, 256), st.integers(1, 2048))
def test_the_ids_are_shared_out(n_seq: int, n_batch: int) -> None:
    n = branches_of_each(n_seq, n_batch)
    assert n == 1 or (n > 2 and n_seq * n <= min(MAX_IDS, n_batch))
