"""After a pass over a tree, all ids of a sequence have the accepted path, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.branches import ids_of, lines, settle
from dflash_local.draft import ANCHOR, Draft


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(0, 12))
    return Draft(list(range(n)), [draw(st.integers(ANCHOR, node - 1)) for node in range(n)])


def path_to(draft: Draft, node: int) -> list[int]:
    """Rows from the anchor to a node."""
    return [0, *(1 + step for step in draft.path(node))]


@settings(deadline=None)
@given(drafts(), st.integers(0, 3))
def test_a_row_sees_its_ancestors_and_no_other_row(draft: Draft, spare: int) -> None:
    rows = lines(draft.parents, len(draft.leaves) + spare or 1)
    for node in range(len(draft)):
        row = node + 1
        seen = [other for other in range(row + 1) if rows[row][0] in rows[other]]
        assert seen == path_to(draft, node)


@settings(deadline=None)
@given(drafts(), st.integers(0, 3), st.data())
def test_the_accepted_path_is_what_stays(draft: Draft, spare: int, data: st.DataObject) -> None:
    n_branches = len(draft.leaves) + spare or 1
    rows = lines(draft.parents, n_branches)
    end = data.draw(st.integers(ANCHOR, len(draft) - 1))
    path = path_to(draft, end)
    held = [[row for row in range(len(rows)) if b in rows[row]] for b in range(n_branches)]
    cuts, grafts = settle(rows, path)
    for cut in cuts:
        del held[cut.branch][cut.length :]
    for graft in grafts:
        assert len(held[graft.branch]) == graft.begin  # llama.cpp counts a cell given twice twice
        held[graft.branch] += held[graft.source][graft.begin : graft.end]
    assert held == [path] * n_branches


def test_more_leaves_than_branches_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 2 leaves"):
        lines([ANCHOR, ANCHOR, ANCHOR], 2)


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_sequence_has_ids_of_its_own(n_seq: int, n_branches: int) -> None:
    ids = ids_of(n_seq, n_branches)
    assert [of_sequence[0] for of_sequence in ids] == list(range(n_seq))
    assert sorted(id_ for of_sequence in ids for id_ in of_sequence) == list(
        range(n_seq * n_branches)
    )
