"""Each sequence's cells are in the order of its tokens, whatever llama.cpp does with free ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.target_model.cell_log import CellLog

N_CELLS, N_SEQ = 600, 3
SPARE = N_SEQ


class Cache:
    """llama.cpp's cells, as it gives them to rows and takes them back: (ids, position) or None."""

    def __init__(self) -> None:
        self.cells: list[tuple[set[int], int] | None] = [None] * N_CELLS
        self.head = 0

    def place(self, rows: list[tuple[int, int]]) -> None:
        used = sum(cell is not None for cell in self.cells)
        at = 0 if self.head > used + 2 * len(rows) else self.head
        for seq, position in rows:
            while self.cells[at % N_CELLS] is not None:
                at += 1
            self.cells[at % N_CELLS] = ({seq}, position)
            self.head = at % N_CELLS + 1

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        for cell in self.cells:
            if cell and source in cell[0] and begin <= cell[1] < end:
                cell[0].add(target)

    def remove(self, seq: int, begin: int) -> None:
        freed = []
        for i, cell in enumerate(self.cells):
            if cell and seq in cell[0] and cell[1] >= begin:
                cell[0].remove(seq)
                if not cell[0]:
                    self.cells[i] = None
                    freed.append(i)
        if freed:
            self.head = min(self.head, freed[0])

    def pack(self) -> None:
        self.remove(SPARE, 0)
        used = [cell for cell in self.cells if cell is not None]
        self.cells = [*used, *[None] * (N_CELLS - len(used))]
        self.head = 0

    def of(self, seq: int) -> list[int]:
        """The cells of a sequence, by position."""
        mine = [(cell[1], i) for i, cell in enumerate(self.cells) if cell and seq in cell[0]]
        assert [position for position, _ in sorted(mine)] == list(range(len(mine)))
        return [i for _, i in sorted(mine)]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_cells_stay_in_order(data: st.DataObject) -> None:
    cache, log = Cache(), CellLog(N_CELLS, N_SEQ)
    lengths = [0] * N_SEQ
    for _ in range(data.draw(st.integers(1, 60))):
        seq = data.draw(st.integers(0, N_SEQ - 1))
        kind = data.draw(st.sampled_from(["rows", "rows", "rows", "cut", "cut", "share"]))
        if kind == "rows":
            counts = [data.draw(st.integers(0, 40)) for _ in range(N_SEQ)]
            if log.n_live + sum(counts) > N_CELLS:
                continue
            if log.must_pack(sum(counts)):
                cache.pack()
                log.pack()
            rows = [(s, lengths[s] + i) for s, n in enumerate(counts) for i in range(n)]
            cache.place(rows)
            log.append([s for s, _ in rows])
            lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        else:
            if kind == "share":
                lengths[seq] = 0
            length = data.draw(st.integers(0, lengths[seq]))
            begin, end = log.cut(seq, length)
            cache.copy(seq, SPARE, begin, end)
            cache.remove(seq, length)
            lengths[seq] = length
            other = data.draw(st.integers(0, N_SEQ - 1))
            if kind == "share" and other != seq:
                lengths[seq] = data.draw(st.integers(0, lengths[other]))
                cache.copy(other, seq, 0, lengths[seq])
                log.share(other, seq, lengths[seq])
        for s in range(N_SEQ):
            assert cache.of(s) == log.cells[s] == sorted(log.cells[s])
            assert len(log.cells[s]) == lengths[s]
        assert log.n_live == len({cell for cells in log.cells for cell in cells})
