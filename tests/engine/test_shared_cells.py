"""Cells that slots share are counted once, whatever was copied and cut before."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from dflash_local.engine.shared_cells import SharedCells

N_SLOTS = 4
slots = st.integers(0, N_SLOTS - 1)
steps = st.lists(
    st.tuples(st.sampled_from(["grow", "cut", "share"]), slots, slots, st.integers(0, 9))
)


@given(steps)
def test_shared_cells_are_counted_once(steps: list[tuple[str, int, int, int]]) -> None:
    numbers = count()
    cells: list[list[int]] = [[] for _ in range(N_SLOTS)]
    shared = SharedCells()
    for step, a, b, n in steps:
        if step == "grow":
            cells[a] += [next(numbers) for _ in range(n)]
        elif step == "cut":
            del cells[a][n:]
            shared.cut(a, n)
        elif a != b:
            n = min(n, len(cells[a]))
            cells[b] = cells[a][:n]
            shared.share(a, b, n)
        assert shared.n_used([len(c) for c in cells]) == len(set().union(*cells))
