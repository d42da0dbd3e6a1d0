"""A drafter that looks back at no more than its last rows, and keeps no more than it may need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mini_pair
import tiny_coder
from dflash_local import load
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.fit.footprint import Footprint
from dflash_local.fit.options import LoadOptions
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from draft_twin import Twin, TwinMaker, make_twin
from shapes import exact_model, of_both_shapes

__all__ = ["make_twin"]

N_CTX = 4000
# Of the twins' cache with a window of up to 183 rows and blocks of 8: 256 cells, one of them spare.
N_RING = 255


# The draft graph, against the reference


@pytest.mark.one_in(9)
@pytest.mark.parametrize("window", [1, 7, 64, 183, 300, N_CTX, 10**9])
def test_equals_the_reference_however_often_the_ring_comes_round(
    window: int, make_twin: TwinMaker
) -> None:
    twin = make_twin(n_ctx=N_CTX, draft_window=window)
    for n_rows in (0, 3, 90, 1, 150, 8, 8, 8, 0, 200, 64, 65, 700, 5, 16, 0):
        twin.draft({0: n_rows})


def test_equals_the_reference_at_every_place_of_the_ring(make_twin: TwinMaker) -> None:
    twin = make_twin(n_ctx=N_CTX, draft_window=20)
    twin.inject(0, 2 * N_RING - 40)
    for _ in range(80):  # window and block come round, row by row
        twin.draft({0: 1})


@pytest.mark.parametrize("window", [30, 8, 3])
def test_the_window_bounds_sliding_layers_too(window: int, make_twin: TwinMaker) -> None:
    options = {"n_layer": 3, "sliding_window": 12, "pattern": (True, False, True)}
    twin = make_twin(n_ctx=N_CTX, draft_window=window, **options)
    for n_rows in (5, 40, 220, 3, 1, 0, 300, 12, 2):
        twin.draft({0: n_rows})


@pytest.mark.parametrize("n_rows", [40, 3 * N_RING + 5])
@pytest.mark.parametrize("other", [-1, 1])
def test_the_window_is_exact_to_the_row(other: int, n_rows: int, make_twin: TwinMaker) -> None:
    twin = make_twin(n_ctx=N_CTX, draft_window=12)
    twin.draft({0: n_rows})
    twin.reference.draft_window += other
    wrong = twin.reference.draft(0, anchor=11)
    twin.reference.draft_window -= other
    twin.assert_not(0, wrong)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history_leaves_what_its_calls_say(data: st.DataObject, history: History) -> None:
    history.restart()
    sequences = st.integers(0, 2)
    for _ in range(data.draw(st.integers(1, 8), "calls")):
        call = data.draw(st.sampled_from(["inject", "draft", "truncate", "copy"]), "call")
        seq = data.draw(sequences, "seq")
        length = history.twin.native.length(seq)
        if call == "inject":
            history.inject(seq, data.draw(st.integers(0, min(700, N_CTX - length)), "rows"))
        elif call == "draft":
            history.draft(seq, data.draw(st.integers(0, min(80, N_CTX - length)), "rows"))
        elif call == "truncate":
            back = data.draw(st.sampled_from([0, 1, 30, 150, 230, 400, length]), "back")
            history.truncate(seq, max(0, length - back))
        else:
            back = data.draw(st.sampled_from([0, 20, 200, 230, length]), "back")
            history.copy(seq, data.draw(sequences, "to"), max(0, length - back))
    for seq in range(3):
        history.draft(seq, min(2, N_CTX - history.twin.native.length(seq)))


class History:
    """A twin whose reference is told what is still there, cell by cell."""

    window = 40

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.restart()

    def restart(self) -> None:
        self.twin.restart()
        self.cells = np.full((3, N_RING), -1)  # the position whose row each cell holds

    def inject(self, seq: int, n: int) -> None:
        self._write(seq, n)
        self.twin.inject(seq, n)

    def draft(self, seq: int, n: int) -> None:
        self._write(seq, n)
        for each in range(seq + 1):  # those before it, too, have a block in the graph
            end = self.twin.native.length(each) + (n if each == seq else 0)
            self.cells[each, np.arange(end, end + self.twin.block_size) % N_RING] = -1
        length = self.twin.native.length(seq) + n
        seen = self.cells[seq]
        n_seen = np.count_nonzero((seen >= max(0, length - self.window)) & (seen < length))
        # No window of the reference hides everything; one row of none is none.
        if n_seen or not length:
            self.twin.reference.draft_window = int(n_seen)
            self.twin.draft({seq: n})
        else:
            request = DraftRequest(seq, 3, self.twin.features(0), 7)
            assert len(self.twin.native.draft([request])[0]) == 7

    def truncate(self, seq: int, length: int) -> None:
        self.twin.truncate(seq, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self.twin.copy(source, target, length)
        self.cells[target] = self.cells[source]

    def _write(self, seq: int, n: int) -> None:
        start = self.twin.native.length(seq)
        for position in range(start, start + n):
            self.cells[seq, position % N_RING] = position


@pytest.fixture(scope="module")
def history(make_twin: TwinMaker) -> History:
    options: dict[str, Any] = {"sliding_window": 16, "pattern": (True, False)}
    return History(make_twin(n_ctx=N_CTX, n_seq=3, draft_window=History.window, **options))


# Memory


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("window", "cells"), [(20, 256), (183, 256), (184, 512), (1500, 1792)])
def test_memory_does_not_grow_beyond_the_window(
    window: int, cells: int, make_twin: TwinMaker
) -> None:
    twin = make_twin(n_seq=2, n_ctx=N_CTX, draft_window=window)
    n_bytes = []
    for _ in range(13):
        twin.inject(0, 300)
        twin.draft({0: 0, 1: 7})
        n_bytes.append(twin.native.n_cache_bytes)
    # 2 layers, keys and values, 2 heads of 16 halves
    assert n_bytes == sorted(n_bytes) and n_bytes[-1] == 2 * cells * 2 * 2 * 2 * 16 * 2
    assert n_bytes[-1] == n_bytes[7]  # 2400 rows
    assert planned(twin.native.path, window, N_CTX, n_seq=2) == n_bytes[-1]
    assert planned(twin.native.path, window, 100 * N_CTX, n_seq=2) == n_bytes[-1]


def planned(path: Path, window: int, n_ctx: int, n_seq: int) -> int:
    target = GgufFile.open(tiny_coder.pair()[0])
    file = GgufFile.open(path)
    options = LoadOptions(n_seq=n_seq, draft_window=window)
    footprint = Footprint(target, file, read_drafter(file), options)
    assert footprint.drafter(n_ctx) <= footprint.drafter(2 * n_ctx)
    return footprint.drafter_kv(n_ctx)


def test_the_plan_says_what_the_window_bounds() -> None:
    options: dict[str, Any] = {"n_ctx": 4096, "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    with load(*mini_pair.pair(), draft_window=100, **options) as model:
        assert model.plan is not None and isinstance(model.drafter, FusedDrafter)
        assert model.plan.draft_window == model.drafter.draft_window == 100
        assert any("for the last 100 tokens" in line for line in model.plan.lines())
        model.generate("def add(a, b):\n" * 60, max_tokens=20, draft_width=8)
        assert model.drafter.n_cache_bytes == model.plan.drafter_kv_bytes < 2**20


# Answers


@pytest.mark.slow
@of_both_shapes("window", [1, 24], [24])
def test_answers_are_those_without_a_window(shape: DraftShape, window: int) -> None:
    prompt = "def add(a, b):\n    return a + b\n\n\n" * 12 + "def sub(a, b):\n"
    with exact_model(shape, n_ctx=1024, draft_window=window) as model:
        plain = model.generate(prompt, max_tokens=60, draft_width=0)
        for width in (16, 4):
            found = model.generate(prompt, max_tokens=60, draft_width=width)
            assert found.tokens == plain.tokens
            assert (found.stats.tree_rounds > 0) == (shape == "tree")
        again = model.generate(prompt[: len(prompt) // 2], max_tokens=30, draft_width=8)
        assert again.stats.cached_tokens > 0  # rolled back beyond what is kept
        assert again.stats.rounds < 30
