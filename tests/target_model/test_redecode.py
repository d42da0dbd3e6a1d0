"""Rows that a recurrent target takes back without snapshots: what stays is decoded again, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_local import demo
from dflash_local.errors import ContextFullError, InputError
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from dflash_local.target_model.way_back import MOST_AGAIN
from hybrid import TAPS, write_hybrid

N_SEQ, N_CTX = 2, 256
Logits = NDArray[np.float32]


@pytest.fixture(scope="module", params=["qwen3next", "granitehybrid", "mamba2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    return write_hybrid(folder / "target.gguf", request.param, demo.pair()[0])


def opened(path: Path, **options: Any) -> Target:
    defaults = {"n_ctx": N_CTX, "n_threads": 1, "n_batch": 128, "kv_type": "q8_0"}
    return Target(path, TargetOptions(**defaults | options))


@pytest.fixture(scope="module")
def right(path: Path) -> Iterator[Callable[[list[int]], Logits]]:
    """The logits after a text, decoded one token at a time by a target that takes nothing back."""
    with opened(path) as plain:

        def after(text: list[int]) -> Logits:
            plain.clear(0)
            for i, token in enumerate(text):
                plain.decode([token], [i], [0], [True])
            return plain.logits(0).copy()

        yield after


@pytest.fixture(scope="module")
def opened_target(path: Path) -> Iterator[Target]:
    with opened(path, n_seq=N_SEQ, redecodes=True) as target:
        yield target


@pytest.fixture
def target(opened_target: Target) -> Target:
    for seq in range(N_SEQ):
        opened_target.clear(seq)
    return opened_target


def tokens(n: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 8000, n).tolist()
    return found


def verified(target: Target, text: list[int], draft: list[int], n_kept: int, seq: int = 0) -> None:
    """A prompt but for its last token, and a draft after it of which so many rows are kept."""
    begin = len(text) - 1
    target.decode(text[:-1], range(begin), [seq] * begin, [False] * begin)
    batch = Batch()
    part = batch.add(seq, begin, [text[-1], *draft])
    target.run(batch)
    assert target.keep(part, range(n_kept))


def test_what_was_kept_is_decoded_again_before_the_next_rows(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    text, draft = tokens(9), tokens(5, 1)
    verified(target, text, draft, 3)
    assert target.shortest(0) == 8 and target.n_again(0) == 3
    kept = [*text, *draft[:2]]
    batch = Batch()
    part = batch.add(0, len(kept), [7, 8, 9])
    assert target.n_rows(batch) == 6
    target.run(batch)
    for row in range(3):
        assert np.array_equal(target.logits(row), right([*kept, 7, 8, 9][: len(kept) + row + 1]))
    assert target.keep(part, range(1)) and target.n_again(0) == 4
    target.decode([3], [len(kept) + 1], [0], [True])
    assert np.array_equal(target.logits(0), right([*kept, 7, 3]))
    assert target.n_again(0) == 0 and target.shortest(0) == len(kept) + 2


def test_a_draft_that_is_right_to_its_end_leaves_nothing(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    text, draft = tokens(9), tokens(5, 1)
    verified(target, text, draft, 6)
    assert target.n_again(0) == 0
    target.decode([3], [14], [0], [True])
    assert np.array_equal(target.logits(0), right([*text, *draft, 3]))


def test_steps_ahead_begin_with_it(target: Target, right: Callable[[list[int]], Logits]) -> None:
    text, draft = tokens(9), tokens(5, 1)
    verified(target, text, draft, 3)
    kept = [*text, *draft[:2]]
    steps = target.decode_ahead([7], [len(kept)], [0], 3, given=[11, 12, 13])
    assert steps == [[11]] and target.n_again(0) == 0
    assert len(target.numbers) == 1
    steps = target.decode_ahead([11], [len(kept) + 1], [0], 2, given=[12, 13])
    assert steps == [[12], [13]] and len(target.numbers) == 2
    target.decode([13], [len(kept) + 3], [0], [True])
    assert np.array_equal(target.logits(0), right([*kept, 7, 11, 12, 13]))


def test_it_is_cut_further_and_read_on_from_there(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    text, draft = tokens(9), tokens(5, 1)
    verified(target, text, draft, 4)
    assert not target.truncate(0, 7)
    assert target.truncate(0, 10) and target.n_again(0) == 2
    assert target.truncate(0, 8) and target.n_again(0) == 0
    target.decode([5], [8], [0], [True])
    assert np.array_equal(target.logits(0), right([*text[:8], 5]))


def test_checkpoints_copies_and_saved_states_have_all_of_it(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    text, draft = tokens(9), tokens(5, 1)
    kept, expected = [*text, *draft[:2]], right([*text, *draft[:2], 5])

    def check(seq: int) -> None:
        target.decode([5], [len(kept)], [seq], [True])
        assert np.array_equal(target.logits(0), expected)
        target.clear(seq)

    verified(target, text, draft, 3)
    assert target.can_copy(0, 11) and not target.can_copy(0, 10)
    with pytest.raises(InputError, match="cannot be shared now"):
        target.copy(0, 1, 10)
    target.copy(0, 1, 11)
    assert target.n_again(0) == target.n_again(1) == 3
    check(1)
    start = target.checkpoint(0, 11)
    assert target.n_again(0) == 0
    check(0)
    verified(target, text, draft, 3)
    saved = target.save(0)
    target.clear(0)
    assert target.restore_saved(1, saved, 11)
    target.decode([7, 8], [11, 12], [1, 1], [True] * 2)
    assert target.restore(1, start) and target.shortest(1) == 11
    check(1)


def test_a_shared_state_is_changed_for_one_sequence_only(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    text = tokens(9)
    begin = len(text)
    target.decode(text, range(begin), [0] * begin, [False] * begin)
    target.copy(0, 1, begin)
    for seq, n_kept in ((0, 2), (1, 3), (0, 1)):
        batch = Batch()
        n = begin + target.n_again(seq)
        part = batch.add(seq, n, [4, 5, 6, 7])
        target.run(batch)
        assert target.keep(part, range(n_kept))
    for seq, more in ((0, [4, 5, 4]), (1, [4, 5, 6])):
        target.decode([8], [begin + 3], [seq], [True])
        assert np.array_equal(target.logits(0), right([*text, *more, 8]))


def test_sequences_with_unequal_rows_to_decode_again(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    texts = [tokens(9), tokens(6, 2)]
    for seq, n_kept in ((0, 3), (1, 1)):
        verified(target, texts[seq], tokens(5, 1), n_kept, seq)
    kept = [[*texts[0], *tokens(5, 1)[:2]], texts[1]]
    target.decode([5, 5], [len(t) for t in kept], [0, 1], [True] * 2)
    assert [target.n_again(seq) for seq in (0, 1)] == [0, 0]
    for seq in (0, 1):
        found = target.logits(seq)
        # cells of several sequences lie in another order than alone
        assert np.allclose(found, right([*kept[seq], 5]), atol=0.1)


def test_hidden_states_are_those_of_the_new_rows(tmp_path: Path) -> None:
    path = write_hybrid(tmp_path / "target.gguf", "qwen3next", demo.pair()[0])
    text, draft = tokens(9), tokens(5, 1)
    with opened(path, tapped_layers=TAPS, redecodes=True) as target:
        verified(target, text, draft, 3)
        whole = [*text, *draft[:2], 7, 8]
        target.decode([7, 8], [11, 12], [0, 0], [True] * 2)
        found = target.hidden_states()
        target.clear(0)
        target.decode(whole, range(13), [0] * 13, [True] * 13)
        assert np.array_equal(found, target.hidden_states([11, 12]))


def test_a_full_context_changes_nothing(
    target: Target, right: Callable[[list[int]], Logits]
) -> None:
    has_no_cells = GgufFile.open(target.path).architecture == "mamba2"
    text, draft = tokens(9), tokens(5, 1)
    n = N_CTX - 14

    def fill(begin: int, end: int) -> None:
        more = end - begin
        target.decode([1] * more, range(begin, end), [1] * more, [False] * more)

    for begin in range(0, n, 100):
        fill(begin, min(begin + 100, n))
    verified(target, text, draft, 3)
    fill(n, n + 4)
    if not has_no_cells:
        with pytest.raises(ContextFullError):
            target.decode([5, 6], [11, 12], [0, 0], [True] * 2)
        assert target.n_again(0) == 3
    target.clear(1)
    target.decode([5], [11], [0], [True])
    assert np.array_equal(target.logits(0), right([*text, *draft[:2], 5]))


def test_plain_steps_keep_their_graph(path: Path) -> None:
    """The second state costs them nothing: no pass builds a graph that it would not build alone."""
    n_built = []
    for redecodes in (False, True):
        with opened(path, redecodes=redecodes) as target:
            verified(target, tokens(9), tokens(5, 1), 6)
            target.decode([1], [14], [0], [True])
            target.decode([2], [15], [0], [True])
            before = target.n_rebuilds
            target.decode_ahead([3], [16], [0], 20)
            n_built.append(target.n_rebuilds - before)
    assert n_built[1] <= n_built[0]


def test_as_many_rows_as_a_batch_has_room_for(path: Path) -> None:
    with opened(path, redecodes=True) as target:
        assert target.most_again == MOST_AGAIN and target.max_width == 64
    with opened(path, redecodes=True, n_batch=16) as target:
        assert (target.most_again, target.max_width) == (8, 8)
        verified(target, tokens(9), tokens(5, 1), 3)
        target.decode(tokens(15, 3), range(11, 26), [0] * 15, [False] * 15)
        assert target.shortest(0) == 26
    with pytest.raises(InputError, match="at least one row for each"):
        opened(path, redecodes=True, n_seq=2, n_batch=3)
