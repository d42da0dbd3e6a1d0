"""A recurrent sequence is cut exactly as far as its snapshots go, whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_local import demo
from dflash_local.errors import BackendError, InputError
from dflash_local.target.rollback import StateRollback
from dflash_local.target.target import Target
from hybrid import ROUTED, SNAPSHOTS, WITHOUT, write_hybrid
from recurrent import write_mamba
from state_texts import (
    N_SEQ,
    Plain,
    Texts,
    check_any_history,
    check_every_number_of_rows,
    opened,
)

# isort: split
import llama_cpp.llama_cpp as api

N_SNAPSHOTS = 7
PathOf = Callable[..., Path]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    folder = tmp_path_factory.mktemp("hybrid")

    def find(architecture: str, quant: str = "Q8_0") -> Path:
        path, source = folder / f"{architecture}-{quant}.gguf", demo.pair()[0]
        if path.exists():
            return path
        if architecture == "mamba":
            return write_mamba(path, source)
        return write_hybrid(path, architecture, source, quant=quant)

    return find


@pytest.fixture(scope="module", params=SNAPSHOTS)
def pair(request: pytest.FixtureRequest, path_of: PathOf) -> Iterator[tuple[Target, Plain]]:
    path = path_of(request.param)
    plain = Plain(path)
    with opened(path, n_seq=N_SEQ, n_snapshots=N_SNAPSHOTS) as target:
        assert target.n_snapshots == N_SNAPSHOTS and target.max_width == N_SNAPSHOTS + 1
        yield target, plain
    plain.close()


@pytest.fixture
def texts(pair: tuple[Target, Plain]) -> Texts:
    return Texts(*pair)


@pytest.mark.one_in(15)
@pytest.mark.parametrize("n_rows", [2, 5, N_SNAPSHOTS + 1])
def test_all_rows_of_a_pass_but_its_first_can_be_taken_back(texts: Texts, n_rows: int) -> None:
    check_every_number_of_rows(texts, n_rows)


def test_after_a_long_pass_as_many_as_there_are_snapshots(texts: Texts) -> None:
    texts.decode([0], 30)
    assert texts.target.shortest(0) == 30 - N_SNAPSHOTS
    assert not texts.cut(0, 29 - N_SNAPSHOTS)
    assert texts.cut(0, 30 - N_SNAPSHOTS)
    texts.decode([0], 2)


def test_what_llama_cpp_gets_wrong_is_refused(texts: Texts) -> None:
    """Its `seq_rm` reaches back past the last pass, where the snapshots are of older passes."""
    texts.decode([0], 9)
    texts.decode([0], 1)
    assert texts.target.shortest(0) == 10
    assert not texts.cut(0, 7)
    texts.decode([0], 1)  # nothing was done
    memory = api.llama_get_memory(texts.target.context)
    assert api.llama_memory_seq_rm(memory, 0, 8, -1)
    texts.target.decode([1], [8], [0], [True])
    right = texts.plain.after([*texts.texts[0][:8], 1])
    assert not np.allclose(texts.target.logits(0), right, atol=0.05)


def test_a_cut_sequence_is_not_cut_again_before_its_next_pass(texts: Texts) -> None:
    texts.decode([0, 1], 8)
    assert texts.cut(0, 6)
    assert texts.target.shortest(0) == 6
    assert not texts.cut(0, 5)
    assert texts.cut(0, 6)  # nothing to do
    texts.decode([1], 3)
    assert not texts.cut(0, 5)
    texts.decode([0], 4)
    assert texts.cut(0, 7)
    texts.decode([0, 1], 2)


def test_a_cut_or_shorter_sequence_is_not_copied(texts: Texts) -> None:
    texts.decode([0], 8)
    assert texts.target.can_copy(0, 8) and not texts.target.can_copy(0, 7)
    assert texts.cut(0, 6)
    assert not texts.target.can_copy(0, 6)
    with pytest.raises(InputError, match="first 6 tokens of sequence 0 cannot be shared now"):
        texts.target.copy(0, 1, 6)
    texts.decode([0], 3)
    texts.target.copy(0, 1, 9)
    texts.texts[1] = list(texts.texts[0])
    # They share their snapshots, too.
    assert not texts.target.truncate(0, 8) and not texts.target.truncate(1, 8)
    texts.decode([1], 4)
    assert texts.cut(1, 11)
    assert not texts.target.truncate(0, 8)
    texts.decode([0], 2)
    texts.decode([0, 1], 2)


def test_clearing_is_always_possible(texts: Texts) -> None:
    texts.decode([0, 1], 8)
    assert texts.cut(0, 5) and texts.cut(0, 0) and texts.cut(1, 0)
    assert texts.target.shortest(0) == 0
    texts.decode([0, 1], 3)


def test_steps_ahead_leave_no_snapshot(texts: Texts) -> None:
    texts.decode([0, 1], 8)
    first = [1, 2]
    steps = texts.target.decode_ahead(first, [8, 8], [0, 1], 4)
    for seq in (0, 1):
        texts.texts[seq] += [first[seq], *(step[seq] for step in steps[:-1])]
        assert texts.target.shortest(seq) == len(texts.texts[seq])
        assert not texts.cut(seq, len(texts.texts[seq]) - 1)
    texts.decode([0, 1], 2)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("architecture", [*SNAPSHOTS, *WITHOUT])
def test_any_history_leaves_the_right_states(architecture: str, path_of: PathOf) -> None:
    back = {"redecodes": True} if architecture in WITHOUT else {"n_snapshots": N_SNAPSHOTS}
    check_any_history(path_of(architecture, "F32"), routed=architecture in ROUTED, **back)


def test_unequal_rows_are_an_error_not_a_wrong_answer(texts: Texts) -> None:
    with pytest.raises(BackendError, match="has split a batch of 5 rows"):
        texts.target.decode([1, 2, 3, 4, 5], [0, 1, 2, 0, 1], [0, 0, 0, 1, 1], [True] * 5)


def test_a_batch_must_hold_more_rows_than_snapshots(path_of: PathOf) -> None:
    """llama.cpp would abort the process."""
    path = path_of("lfm2")
    with pytest.raises(InputError, match="n_batch is 8 with 7 snapshots; give it at least 9"):
        opened(path, n_batch=8, n_snapshots=7)
    with opened(path, n_batch=9, n_snapshots=7) as target:
        target.decode(range(9), range(9), [0] * 9, [True] * 9)


@pytest.mark.parametrize("architecture", [*WITHOUT, "mamba"])
def test_without_snapshots_there_are_checkpoints(architecture: str, path_of: PathOf) -> None:
    path = path_of(architecture)
    plain = Plain(path)
    with opened(path, n_snapshots=N_SNAPSHOTS) as target:
        assert (target.n_snapshots, target.max_width) == (0, 1)
        target.decode(range(9), range(9), [0] * 9, [True] * 9)
        assert target.shortest(0) == 9 and not target.truncate(0, 8)
        assert target.keeps_checkpoints
        start = target.checkpoint(0, 9)
        for token in (3, 4):
            target.decode([token, 5], [9, 10], [0, 0], [True] * 2)
            found, right = target.logits(1), plain.after([*range(9), token, 5])
            # mamba's weights are in F32, where a pass of more rows rounds differently
            assert np.allclose(found, right, atol=0.05 if architecture == "mamba" else 0)
            assert target.restore(0, start) and target.shortest(0) == 9
    plain.close()


def test_the_numbers_themselves() -> None:
    states = StateRollback(2, 3)
    states.begin_pass()
    states.end_pass([0] * 8 + [1] * 8, [*range(8), *range(8)])
    assert (states.shortest(0), states.shortest(1)) == (5, 5)
    states.begin_pass()  # it fails
    assert states.shortest(0) == 8
    states.begin_pass()
    states.end_pass([1, 1], [8, 9])
    assert (states.shortest(0), states.shortest(1)) == (8, 9)
    states.cut(1, 9)
    assert states.shortest(1) == 9 and not states.can_copy(1, 9) and states.can_copy(0, 8)
    states.share(0, 1)
    assert states.can_copy(1, 8)
    states.cut(0, 0)
    assert states.shortest(0) == 0
