"""A recurrent sequence is cut exactly as far as its snapshots or its replay go, whatever happens
around it, and its state is that of the rows that stay."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_coder
from dflash_local.errors import BackendError, InputError
from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.llama import native
from dflash_local.target_model.replay import can_replay
from dflash_local.target_model.target import Target
from hybrid import REPLAYED, ROUTED, SNAPSHOTS, WITHOUT, write_hybrid
from recurrent import write_mamba
from state_texts import N_SEQ, Plain, Texts, check_any_history, check_every_number_of_rows, opened

# isort: split
import llama_cpp.llama_cpp as api

N_ROWS = 7
"""The most rows that are taken back."""
PathOf = Callable[..., Path]
BY_SNAPSHOTS = [(name, "snapshots") for name in SNAPSHOTS]
BY_REPLAY = [(name, "replay") for name in REPLAYED]
by_snapshots = pytest.mark.parametrize("kind", BY_SNAPSHOTS, indirect=True, ids="-".join)
by_replay = pytest.mark.parametrize("kind", BY_REPLAY, indirect=True, ids="-".join)
pytestmark = pytest.mark.one_in(4)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    folder = tmp_path_factory.mktemp("hybrid")

    def find(architecture: str, quant: str = "Q8_0") -> Path:
        path, source = folder / f"{architecture}-{quant}.gguf", tiny_coder.pair()[0]
        if path.exists():
            return path
        if architecture == "mamba":
            return write_mamba(path, source)
        return write_hybrid(path, architecture, source, quant=quant)

    return find


@pytest.fixture(scope="module", params=BY_SNAPSHOTS + BY_REPLAY, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An architecture, and how rows are taken back."""
    return tuple(request.param)


@pytest.fixture(scope="module")
def pair(kind: tuple[str, str], path_of: PathOf) -> Iterator[tuple[Target, Plain]]:
    path, way_back = path_of(kind[0]), WayBack(kind[1], N_ROWS)
    with closing(Plain(path)) as plain, opened(path, n_seq=N_SEQ, way_back=way_back) as target:
        assert (target.way_back, target.max_width) == (way_back, 1 + N_ROWS)
        yield target, plain


@pytest.fixture
def texts(pair: tuple[Target, Plain]) -> Texts:
    return Texts(*pair)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("n_rows", [2, 5, 1 + N_ROWS])
def test_all_rows_of_a_pass_but_its_first_can_be_taken_back(texts: Texts, n_rows: int) -> None:
    check_every_number_of_rows(texts, n_rows)


def test_steps_ahead_are_not_taken_back(texts: Texts) -> None:
    texts.decode([0, 1], 8)
    first = [1, 2]
    steps = texts.target.decode_ahead(first, [8, 8], [0, 1], 4)
    for seq in (0, 1):
        texts.texts[seq] += [first[seq], *(step[seq] for step in steps[:-1])]
        assert texts.target.shortest(seq) == len(texts.texts[seq])
        assert not texts.cut(seq, len(texts.texts[seq]) - 1)
    texts.decode([0, 1], 2)


def test_unequal_rows_are_an_error_not_a_wrong_answer(texts: Texts) -> None:
    with pytest.raises(BackendError, match="has split a batch of 5 rows"):
        texts.target.decode([1, 2, 3, 4, 5], [0, 1, 2, 0, 1], [0, 0, 0, 1, 1], [True] * 5)
    for seq in (0, 1):
        texts.target.clear(seq)
    texts.decode([0, 1], 4)
    assert texts.cut(0, 2)
    texts.decode([0, 1], 1)


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("architecture", "way"), [*BY_SNAPSHOTS, *BY_REPLAY])
def test_any_history_leaves_the_right_states(architecture: str, way: Any, path_of: PathOf) -> None:
    back = WayBack(way, N_ROWS)
    check_any_history(path_of(architecture, "F32"), routed=architecture in ROUTED, way_back=back)


# By snapshots


@by_snapshots
def test_after_a_long_pass_as_many_as_there_are_snapshots(texts: Texts) -> None:
    texts.decode([0], 30)
    assert texts.target.shortest(0) == 30 - N_ROWS
    assert not texts.cut(0, 29 - N_ROWS)
    assert texts.cut(0, 30 - N_ROWS)
    texts.decode([0], 2)


@by_snapshots
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


@by_snapshots
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


@by_snapshots
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


def test_a_batch_must_hold_more_rows_than_snapshots(path_of: PathOf) -> None:
    """llama.cpp would abort the process."""
    path = path_of("lfm2")
    with pytest.raises(InputError, match="n_batch is 8 with 7 snapshots; give it at least 9"):
        opened(path, n_batch=8, way_back=WayBack("snapshots", 7))
    with opened(path, n_batch=9, way_back=WayBack("snapshots", 7)) as target:
        target.decode(range(9), range(9), [0] * 9, [True] * 9)


@pytest.mark.parametrize("architecture", [*WITHOUT, "mamba"])
def test_without_snapshots_there_are_checkpoints(architecture: str, path_of: PathOf) -> None:
    path = path_of(architecture)
    plain = Plain(path)
    with opened(path, way_back=WayBack("snapshots", N_ROWS)) as target:
        assert (target.way_back, target.max_width) == (CELLS, 1)
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


# By replay


@by_replay
def test_a_pass_of_more_rows_stays(texts: Texts) -> None:
    for n_rows in (2 + N_ROWS, 30):
        texts.decode([0], n_rows)
        length = len(texts.texts[0])
        assert texts.target.shortest(0) == length
        assert not texts.cut(0, length - 1)
        texts.decode([0], 2)


@by_replay
def test_only_the_last_pass_is_taken_back(texts: Texts) -> None:
    texts.decode([0, 1], 8)
    texts.decode([1], 2)
    assert texts.target.shortest(0) == 8
    assert not texts.cut(0, 7)
    texts.decode([0], 1)
    assert texts.target.shortest(0) == 9
    assert not texts.cut(0, 8)
    texts.decode([0, 1], 2)


@by_replay
def test_a_cut_sequence_is_copied(texts: Texts) -> None:
    texts.decode([0], 8)
    assert texts.target.can_copy(0, 8) and not texts.target.can_copy(0, 7)
    assert texts.cut(0, 6)
    texts.target.copy(0, 1, 6)
    texts.texts[1] = list(texts.texts[0])
    # They share one state now.
    assert not texts.cut(0, 5) and not texts.cut(1, 5)
    texts.decode([1], 4)
    assert texts.cut(1, 7)
    texts.decode([0, 1], 2)


@by_replay
def test_checkpoints_and_saved_sequences_of_a_cut_sequence(texts: Texts) -> None:
    target = texts.target
    texts.decode([0, 1], 8)
    assert texts.cut(0, 5) and texts.cut(1, 3)
    checkpoint, saved = target.checkpoint(0, 5), target.save(1)
    texts.decode([0, 1], 6)
    assert texts.cut(0, 7)
    assert target.restore(0, checkpoint)
    del texts.texts[0][5:]
    assert target.shortest(0) == 5 and not texts.cut(0, 4)
    target.clear(2)
    assert target.restore_saved(2, saved, [1, 2, 3])
    texts.texts[2] = texts.texts[1][:3]
    texts.decode([2, 0, 1], 3)
    assert texts.cut(2, 4)
    texts.decode([2, 0, 1], 1)


@by_replay
def test_plain_steps_between_passes_of_drafts(texts: Texts) -> None:
    """ggml gives out places for the tensors of each kind of graph anew; data kept of a pass are not
    written over by a later step of it."""
    for n_rows in (1, 4, 1, 8, 30, 3, 1, 1, 8, 2, 12, 5):
        texts.decode([0], n_rows)
        if 1 < n_rows <= 1 + N_ROWS:
            assert texts.cut(0, len(texts.texts[0]) - 1)


@by_replay
@pytest.mark.parametrize("seqs", [[0], [0, 1, 2]])
def test_rounds_of_as_many_rows_keep_their_graph(
    kind: tuple[str, str], path_of: PathOf, pair: tuple[Target, Plain], seqs: list[int]
) -> None:
    """llama.cpp builds it again only for other sequences, another number of rows, or more cells.

    Cells of a new target: after other tests these rounds may begin near the end of the 256 cells
    that a graph reads.
    """
    with opened(path_of(kind[0]), n_seq=N_SEQ, way_back=WayBack(kind[1], N_ROWS)) as target:
        texts = Texts(target, pair[1])
        for n_kept in range(1, 8):
            texts.decode(seqs, 8)
            if n_kept == 3:
                n_built = target.native.n_rebuilds
            for seq in seqs:
                assert texts.cut(seq, len(texts.texts[seq]) - 8 + n_kept)
        assert target.native.n_rebuilds == n_built


def test_others_are_not_replayed(path_of: PathOf) -> None:
    with opened(path_of("nemotron_h"), way_back=WayBack("replay", N_ROWS)) as target:
        assert (target.way_back, target.max_width) == (CELLS, 1)
    assert not can_replay("nemotron_h", [], 0)


def test_this_build_allows_it() -> None:
    assert native.can_replay() and all(can_replay(name, [], 0) for name in REPLAYED)
