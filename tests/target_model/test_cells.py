"""llama.cpp keeps its graph from one tree to the next; tests/engine proves what trees become."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_local.draft.draft import ANCHOR
from dflash_local.target_model.cells import branches_of_rows


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    return [draw(st.integers(ANCHOR, node - 1)) for node in range(draw(st.integers(1, 12)))]


@given(parents(), parents())
def test_trees_of_as_many_rows_have_the_same_first_branches(
    one: list[int], other: list[int]
) -> None:
    n = min(len(one), len(other))
    each = [branches_of_rows(tree[:n], n + 1) for tree in (one, other)]
    firsts = [[branches[0] for branches in row_branches] for row_branches in each]
    assert firsts == [list(range(n + 1))] * 2
