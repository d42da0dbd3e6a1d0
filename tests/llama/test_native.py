"""The native part as Python calls it: its threads, and what it refuses instead of an abort."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tiny_coder
from dflash_local import InputError, Target
from dflash_local.draft.drafter import DraftRequest
from dflash_local.errors import BackendError, ClosedError, ContextFullError
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import native
from dflash_local.loading import open_drafter
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from dflash_local.target_model.taps import StoredFeatures
from recurrent import write_mamba

TEXT = "def add(a, b):\n    return a"


def drafted(n_threads: int, drafter_threads: int | None = None) -> tuple[list[int], list[int]]:
    """The likeliest token after TEXT, and the drafts after that one."""
    target_path, drafter_path = tiny_coder.pair()
    options = {"n_ctx": 256, "kv_type": "q8_0", "tapped_layers": (2, 4, 6)}
    with Target.load(target_path, n_threads=n_threads, **options) as target:
        drafter = open_drafter(drafter_path, target, n_seq=1, n_ctx=256, n_threads=drafter_threads)
        tokens = target.vocabulary.tokenize(TEXT)
        n = len(tokens)
        target.decode(tokens, range(n), [0] * n, [False] * (n - 1) + [True])
        best = target.native.best
        first = target.native.first_stored
        features = StoredFeatures(target, list(range(first, first + n)))
        (draft,) = drafter.draft([DraftRequest(0, best[0], features, 7)])
    return best, list(draft.tokens)


@pytest.mark.slow
def test_any_number_of_threads_computes_the_same() -> None:
    one = drafted(1)
    assert drafted(2) == one
    assert drafted(3) == one
    assert drafted(1, drafter_threads=2) == one  # more than the pool that it shares has


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux builds of llama.cpp export")
def test_what_is_used_of_llama_cpp_beyond_its_headers_is_as_expected() -> None:
    assert native.PRIVATE_DOUBTS == []


@pytest.mark.parametrize("n", [-1, 8193, 2**31 - 1])
def test_numbers_that_ggml_does_not_take_are_refused(n: int) -> None:
    with pytest.raises(InputError, match=f"n_threads {n} is not in 1 .. 512"):
        native.ThreadPool(n)
    with pytest.raises(InputError, match=f"{n} candidates of 8192 tokens"):
        native.TokenDraw(8192, 0, 0, 0, 0, 1.0, 0.0, False, 0.0, 0.0, 1, n, False)
    with pytest.raises(ValueError, match="thread pool"):
        native.TargetPass(0, 1, [], 0, True, n_returned=4)


@pytest.mark.parametrize("id_", [-1, 1, 256, 2**31 - 1, -(2**31)])
def test_cells_of_other_ids_are_refused(id_: int) -> None:
    with Target.load(tiny_coder.pair()[0], n_ctx=64, n_batch=32) as target:
        context = native.address(target.context)
        for cuts, copies in (([(id_, 0)], []), ([], [(id_, 0, 0, 1)]), ([], [(0, id_, 0, 1)])):
            with pytest.raises(InputError, match=f"id {id_} is not in 0 .. 0"):
                native.edit_cells(context, cuts, copies)
        target.decode([1], [0], [0], [True])


def test_a_cut_that_a_recurrent_state_refuses_is_an_error(tmp_path: Path) -> None:
    path = write_mamba(tmp_path / "mamba.gguf", tiny_coder.pair()[0])
    with Target.load(path, n_ctx=64, n_batch=32) as target:
        target.decode([1, 2, 3], range(3), [0] * 3, [False, False, True])
        with pytest.raises(BackendError, match="cannot forget positions 1 and up of id 0"):
            native.edit_cells(native.address(target.context), [(0, 1)], [])


def test_a_drafter_outlives_the_pass_whose_rows_it_reads() -> None:
    """As where they are freed in the wrong order."""
    target_path, drafter_path = tiny_coder.pair()
    spec = read_drafter(GgufFile.open(drafter_path))
    with Target.load(target_path, n_ctx=64, n_batch=32, tapped_layers=(2, 4, 6)) as target:
        target.decode(range(9), range(9), [0] * 9, [True] * 9)
        first, found = target.native.first_stored, []
        drafters = [
            native.FusedDrafter(target.address, target.native, str(drafter_path), spec, 1, 64, 1, 1)
            for _ in range(2)
        ]
        for drafter in drafters:
            drafter.begin([0], [list(range(first, first + 9))], [5], 7)
            found.append(drafter.read()[0].tolist())
            target.reopen(target.options)  # frees the pass
        assert found[0] == found[1]


def test_a_draw_outlives_its_sampler() -> None:
    params = SamplingParams(temperature=0.8, top_k=40, repeat_penalty=1.2, seed=3)
    row = np.linspace(-4, 4, 8192, dtype=np.float32)
    with Sampler(params, 8192, n_ctx=64) as other:
        expected = [other.sample(row) for _ in range(20)]
    sampler = Sampler(params, 8192, n_ctx=64)
    draw = sampler.native
    sampler.close()
    assert [draw.from_row(row) for _ in range(20)] == expected
    with pytest.raises(ClosedError, match="closed"):
        sampler.sample(row)


def test_more_rows_than_a_batch_are_refused() -> None:
    with Target.load(tiny_coder.pair()[0], n_ctx=256, n_batch=32, tapped_layers=(1,)) as target:
        n = target.n_batch + 1
        for method in (target.decode_ahead, target.native.decode_ahead):
            with pytest.raises(InputError, match=f"a pass of {n} rows; expected 1 to {n - 1}"):
                method([1] * n, list(range(n)), [0] * n, 1, [None] * n, [])
        target.decode([1], [0], [0], [True])


def test_a_pass_that_fails_leaves_no_rows_to_draw_from() -> None:
    with Target.load(tiny_coder.pair()[0], n_ctx=256, n_batch=128) as target:
        for begin in (0, 128):
            rows = range(begin, begin + 128)
            target.decode([1] * 128, rows, [0] * 128, [row % 128 == 0 for row in rows])
        target.candidates(0, 1)
        with pytest.raises(ContextFullError):
            target.decode([1], [256], [0], [True])
        with pytest.raises(InputError, match="output row 0 is not in the last pass of 0"):
            target.candidates(0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux lists")
def test_threads_end_with_their_target() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    drafted(2)  # what is started once for the process
    before = count()
    for _ in range(2):
        drafted(2)
    assert count() == before
