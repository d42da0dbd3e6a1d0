"""A recurrent sequence is cut exactly as far as its snapshots or its replay go, whatever happens
around it, and its state is that of the rows that stay."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from dflash_local.errors import BackendError, InputError
from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.llama import native
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.replay import can_replay
from dflash_local.target_model.target import Target
from hybrid import REPLAYED, ROUTED, SNAPSHOTS, WITHOUT, write_hybrid
from recurrent import write_mamba

# isort: split
import llama_cpp.llama_cpp as api

N_ROWS = 7
"""The most rows that are taken back."""
N_SEQ = 3
NOISE = 0.1
Logits = NDArray[np.float32]
PathOf = Callable[..., Path]
BY_SNAPSHOTS = [(name, "snapshots") for name in SNAPSHOTS]
BY_REPLAY = [(name, "replay") for name in REPLAYED]
by_snapshots = pytest.mark.parametrize("kind", BY_SNAPSHOTS, indirect=True, ids="-".join)
by_replay = pytest.mark.parametrize("kind", BY_REPLAY, indirect=True, ids="-".join)
pytestmark = pytest.mark.one_in(4)


def opened(path: Path, **options: Any) -> Target:
    defaults = {"n_ctx": 512, "n_threads": 1, "n_batch": 64, "kv_type": "q8_0"}
    return Target(path, TargetOptions(**defaults | options))


class Plain:
    """The logits after any text, decoded one token at a time without snapshots."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._target = opened(path, **options)
        self._text: list[int] = []
        self._logits: Logits | None = None

    def after(self, text: Sequence[int]) -> Logits:
        if self._text != list(text[: len(self._text)]):
            self._target.clear(0)
            self._text = []
        for token in text[len(self._text) :]:
            self._target.decode([token], [len(self._text)], [0], [True])
            self._text.append(token)
            self._logits = self._target.logits(0).copy()
        assert self._logits is not None
        return self._logits

    def close(self) -> None:
        self._target.close()


class Texts:
    """The sequences of a target, and the text that each one should have: a wrong state shows in the
    next logits."""

    def __init__(self, target: Target, plain: Plain, seed: int = 0) -> None:
        self.target, self.plain = target, plain
        self.errors: list[float] = []
        """The largest error of a logit in each row so far."""
        self.most_error = 0.0
        self.rng = np.random.default_rng(seed)
        self.texts: list[list[int]] = [[] for _ in range(target.options.n_seq)]
        for seq in range(len(self.texts)):
            target.clear(seq)

    def decode(self, seqs: Sequence[int], n_rows: int) -> None:
        """So many random tokens for each of these sequences, and all their logits are right."""
        tokens, positions, ids = [], [], []
        for seq in seqs:
            begin = len(self.texts[seq])
            new = self.rng.integers(0, self.target.n_vocab, n_rows).tolist()
            self.texts[seq] += new
            tokens += new
            positions += range(begin, begin + n_rows)
            ids += [seq] * n_rows
        self.target.decode(tokens, positions, ids, [True] * len(tokens))
        for i, (seq, position) in enumerate(zip(ids, positions, strict=True)):
            right = self.plain.after(self.texts[seq][: position + 1])
            self.errors.append(float(np.abs(self.target.logits(i) - right).max()))
            assert self.errors[-1] <= self.most_error, (seq, position)

    def cut(self, seq: int, length: int) -> bool:
        done = self.target.truncate(seq, length)
        if done:
            del self.texts[seq][length:]
        return done


def any_history(texts: Texts) -> None:
    """Passes over some sequences, cuts, copies, checkpoints and new texts in any order."""
    rng, target = texts.rng, texts.target
    checkpoints: dict[int, Any] = {}
    n_cuts = 0
    for _ in range(50):
        seq = int(rng.integers(N_SEQ))
        length = len(texts.texts[seq])
        match int(rng.integers(8)):
            case 0 if length > 40:
                assert texts.cut(seq, 0)
                checkpoints.pop(seq, None)
            case 1:
                other = (seq + 1) % N_SEQ
                if target.can_copy(seq, length) and length:
                    target.clear(other)
                    target.copy(seq, other, length)
                    texts.texts[other] = list(texts.texts[seq])
                    checkpoints.pop(other, None)
            case 2 if length:
                checkpoints[seq] = target.checkpoint(seq, length)
            case 3 if seq in checkpoints and checkpoints[seq].length <= length:
                assert target.restore(seq, checkpoints[seq])
                del texts.texts[seq][checkpoints[seq].length :]
            case 4 | 5 if length > target.shortest(seq) > 0:
                n_cuts += 1
                to = int(rng.integers(target.shortest(seq), length))
                assert texts.cut(seq, to)
                if to % 2:  # a replay begins, as while a device drafts
                    target.tidy()
                if seq in checkpoints and checkpoints[seq].length > to:
                    del checkpoints[seq]
            case _:
                n = int(rng.integers(1, N_SEQ + 1))
                seqs = rng.permutation(N_SEQ)[:n].tolist()
                texts.decode(seqs, int(rng.integers(1, 12)))
    assert n_cuts > 2
    for seq in range(N_SEQ):
        texts.decode([seq], 2)


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
    texts.decode([0], 9)
    for n_kept in range(1, n_rows + 1):
        begin = len(texts.texts[0])
        texts.decode([0], n_rows)
        assert texts.target.shortest(0) == begin + 1
        assert texts.cut(0, begin + n_kept)
        texts.decode([0], 1 + n_kept % 2)


def test_of_a_longer_pass_as_many_as_there_are_snapshots(
    texts: Texts, kind: tuple[str, str]
) -> None:
    """And none by replay."""
    most = N_ROWS if kind[1] == "snapshots" else 0
    for n_rows in (2 + N_ROWS, 30):
        texts.decode([0], n_rows)
        least = len(texts.texts[0]) - most
        assert texts.target.shortest(0) == least
        assert not texts.cut(0, least - 1)
        assert texts.cut(0, least)
        texts.decode([0], 2)


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


@pytest.mark.one_in(48)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("architecture", "way"), [*BY_SNAPSHOTS, *BY_REPLAY])
def test_any_history_leaves_the_right_states(
    architecture: str, way: Any, seed: int, path_of: PathOf
) -> None:
    """The cells of attention are then in another order than in plain decoding, so sums round
    differently, and now and then a router chooses another expert. A wrong state is wrong by 3 and
    more, in this row and in all after it."""
    path, how = path_of(architecture, "F32"), {"way_back": WayBack(way, N_ROWS), "kv_type": "f32"}
    with closing(Plain(path, kv_type="f32")) as plain, opened(path, n_seq=N_SEQ, **how) as target:
        texts = Texts(target, plain, seed)
        texts.most_error = np.inf if architecture in ROUTED else NOISE
        any_history(texts)
        assert np.mean(np.array(texts.errors) > NOISE) < 0.01


# By snapshots


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
