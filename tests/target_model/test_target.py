"""The results that a pass leaves on its device equal the target's logits and layers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mini_pair
from dflash_local import load
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.errors import InputError, NotFiniteError
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from gguf_files import UINT32, Tensor, changed, parts, spoil
from recurrent import write_mamba
from synthetic import write_target

LAYERS = (1, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    return write_target(folder / "target.gguf", n_layer=4, n_vocab=333)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Path:
    return write_mamba(tmp_path_factory.mktemp("recurrent") / "mamba.gguf", path)


@pytest.fixture
def target(path: Path) -> Iterator[Target]:
    options = TargetOptions(n_ctx=512, n_seq=3, n_batch=64, n_threads=1, tapped_layers=LAYERS)
    with Target(path, options) as opened:
        yield opened


def opened(path: Path, **options: Any) -> Target:
    return Target(path, TargetOptions(n_ctx=512, n_threads=1, **options))


class Rows:
    """Random tokens for the sequences of a target, each at its own length."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        self.target = target
        self.lengths = [0] * target.options.n_seq
        self._random = np.random.default_rng(seed)

    def clear(self) -> None:
        for seq in range(len(self.lengths)):
            self.target.clear(seq)
            self.lengths[seq] = 0

    def decode(self, widths: Sequence[int], outputs: float = 1.0) -> list[bool]:
        """The next rows of each sequence, so many; the share of them whose logits are wanted."""
        tokens, positions, seqs = [], [], []
        for seq, width in enumerate(widths):
            begin = self.lengths[seq]
            tokens += self._random.integers(0, self.target.n_vocab, width).tolist()
            positions += range(begin, begin + width)
            seqs += [seq] * width
            self.lengths[seq] += width
        output = (self._random.random(len(tokens)) < outputs).tolist()
        self.target.decode(tokens, positions, seqs, output)
        return output


def check_best(target: Target, output: list[bool]) -> None:
    wanted = [row for row, asked in enumerate(output) if asked]
    assert target.native.best == [int(target.logits(row).argmax()) for row in wanted]


@pytest.mark.parametrize("outputs", [0.0, 0.5, 1.0])
def test_the_best_is_the_largest_logit(target: Target, outputs: float) -> None:
    rows = Rows(target)
    for width in range(1, 17):
        check_best(target, rows.decode([width, 0, 0], outputs))
        check_best(target, rows.decode([1, width, 2], outputs))
        check_best(target, rows.decode([0, 3, 0], outputs))


def test_logits_are_those_of_the_row_asked_for(path: Path) -> None:
    """A row's logits do not depend on which other rows have any."""
    with opened(path) as some, opened(path) as all_rows:
        asked = Rows(some).decode([13], 0.5)
        Rows(all_rows).decode([13], 1.0)
        for row in range(13):
            if asked[row]:
                assert np.allclose(some.logits(row), all_rows.logits(row), atol=1e-4)
            else:
                with pytest.raises(InputError, match=f"row {row} .* without logits"):
                    some.logits(row)


@pytest.mark.parametrize("on_device", [False, True])
def test_candidates_are_the_largest_logits(tmp_path: Path, on_device: bool) -> None:
    """Also by the graph of a GPU, here on the CPU."""
    params = SamplingParams(0.5, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    with (
        opened(write_target(tmp_path / "wide.gguf", n_vocab=4096), n_batch=128, n_seq=2) as target,
        Sampler(params, target.n_vocab, n_ctx=64) as sampler,
    ):
        target.native.search_on_cpu = on_device
        rows = Rows(target)
        for widths, ks in (((40, 30), (20, 41)), ((1, 0), (41, 4096)), ((3, 1), (64, 1, 65, 300))):
            wanted = [row for row, asked in enumerate(rows.decode(widths, 0.8)) if asked]
            for k in ks:
                for output_row, row in reversed(list(enumerate(wanted))):
                    logits = target.logits(row)
                    ids, largest = target.candidates(output_row, k)
                    assert np.array_equal(ids, np.argsort(-logits, kind="stable")[:k])
                    assert np.array_equal(largest, logits[ids])
                    if on_device:
                        total = np.log(np.exp(logits.astype(np.float64)).sum())
                        assert target.log_sum(output_row) == pytest.approx(total, abs=1e-5)
            for n in (4097, 0, -1, 2**31 - 1):
                with pytest.raises(InputError, match="candidates"):
                    target.candidates(0, n)
            for output_row in (len(wanted), -1):
                with pytest.raises(InputError, match="output row"):
                    target.candidates(output_row, 5)
                for how in (None, sampler.native):
                    with pytest.raises(InputError, match="output row"):
                        target.draw(how, output_row)


@pytest.mark.parametrize("layer", LAYERS)
def test_hidden_states_are_what_goes_into_a_layer(path: Path, tmp_path: Path, layer: int) -> None:
    """A target cut off before that layer makes its logits of them."""

    def cut(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("blk.")]:
            if int(name.split(".")[1]) >= layer:
                del tensors[name]

    keys = {"qwen3.block_count": (layer, UINT32, None)}
    short = changed(path, tmp_path / "short.gguf", keys=keys, tensors=cut)
    tokens = [5, 9, 2, 300, 17, 41]
    with opened(path, tapped_layers=LAYERS) as target:
        target.decode(tokens, range(6), [0] * 6, [False] * 6)
        states = target.hidden_states()
        assert states.shape == (6, len(LAYERS), target.n_embd)
        assert np.array_equal(target.hidden_states([4, 1]), states[[4, 1]])
    _, tensors = parts(path)
    state = states[:, LAYERS.index(layer)]
    normed = state / np.sqrt(np.square(state).mean(axis=1, keepdims=True) + 1e-6)
    expected = normed * tensors["output_norm.weight"][0] @ tensors["token_embd.weight"][0].T
    with opened(short) as target:
        target.decode(tokens, range(6), [0] * 6, [True] * 6)
        assert np.allclose([target.logits(row) for row in range(6)], expected, atol=1e-3)


def test_rows_are_kept_until_later_ones_take_their_place(target: Target) -> None:
    rows = Rows(target)
    written = np.zeros((0, target.n_features), np.float32)
    n_stored = target.native.n_stored
    assert n_stored >= target.n_batch + 3 * 64
    widths = [(64, 0, 0), (1, 5, 2), (20, 30, 14), (0, 0, 1), (16, 16, 16)]
    for width in widths * 4:
        if sum(rows.lengths) > 400:
            rows.clear()
        first = len(written)
        rows.decode(width, 0.1)
        assert target.native.first_stored == first
        states = target.hidden_states().reshape(-1, target.n_features)
        written = np.concatenate([written, states])
        oldest = max(0, len(written) - n_stored)
        assert np.array_equal(target.stored(range(oldest, len(written))), written[oldest:])
        some = [len(written) - 1, oldest, oldest]
        assert np.array_equal(np.asarray(StoredFeatures(target, some)), written[some])
        for gone in (-1, oldest - 1, len(written)):
            with pytest.raises(InputError, match=f"row {gone} are not there"):
                target.stored([oldest, gone])
    assert oldest > 0


def test_hidden_states_do_not_depend_on_how_rows_are_batched(target: Target) -> None:
    tokens = list(range(40, 70))
    target.decode(tokens, range(30), [0] * 30, [False] * 30)
    together = target.hidden_states()
    one_by_one = []
    for position, token in enumerate(tokens):
        target.decode([token, 7], [position, position], [1, 2], [True, False])
        one_by_one.append(target.hidden_states([0])[0])
    assert np.allclose(one_by_one, together, atol=1e-3)


def test_the_graph_is_built_for_a_new_width_and_then_used_again(target: Target) -> None:
    rows = Rows(target)

    def n_rebuilds(widths: Sequence[int]) -> int:
        before = target.native.n_rebuilds
        rows.decode(widths)
        return target.native.n_rebuilds - before

    assert n_rebuilds([1, 0, 0]) > 0
    for widths in ([4, 0, 0], [1, 1, 1], [8, 8, 0], [2, 0, 0]):
        assert n_rebuilds(widths) > 0
        assert [n_rebuilds(widths) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("n_seq", [2, 3, 7])
def test_any_number_of_sequences_is_tapped(path: Path, n_seq: int) -> None:
    with opened(path, n_seq=n_seq, n_batch=100, tapped_layers=LAYERS) as target:
        rows = Rows(target)
        for widths in ([100 // n_seq] * n_seq, [1] * n_seq):
            check_best(target, rows.decode(widths, 0.3))
            assert np.isfinite(target.hidden_states()).all()


def test_without_a_drafter_nothing_is_stored(path: Path) -> None:
    with opened(path, n_seq=2) as target:
        check_best(target, Rows(target).decode([5, 2], 0.7))
        assert target.native.n_stored == 0
        for read in (target.hidden_states, lambda: target.stored([0])):
            with pytest.raises(InputError, match="no layers are tapped"):
                read()


@pytest.mark.parametrize("given", [[], [[5, 7], [6, 2], [9, 9], [4, 3]]])
def test_steps_ahead_equal_steps_one_by_one(path: Path, given: list[list[int]]) -> None:
    """Greedy ones, or with the tokens that are given; hidden states are those of that text."""
    with opened(path, n_seq=2, tapped_layers=LAYERS) as target:
        Rows(target).decode([9, 4])
        in_steps = [token for step in given for token in step]
        steps = target.decode_ahead([3, 8], [9, 4], [0, 1], 4, given=in_steps)
        assert len(steps) == 4 and steps == (given or steps)
        states = target.stored(range(target.native.first_stored, target.native.first_stored + 8))
        for seq, length in ((0, 9), (1, 4)):
            target.truncate(seq, length)
        features = []
        for i, tokens in enumerate([[3, 8], *steps]):
            assert given or i == 0 or tokens == target.native.best
            if i < 4:
                target.decode(tokens, [9 + i, 4 + i], [0, 1], [True, True])
                features.append(target.hidden_states().reshape(2, -1))
        assert np.array_equal(states, np.concatenate(features))


def spoil_one(tensors: dict[str, Tensor]) -> None:
    """A single NaN in each row of logits."""
    values, kind = tensors["token_embd.weight"]
    values = values.copy()
    values[77] = np.nan
    tensors["token_embd.weight"] = values, kind


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("n_seq", [1, 2])
@pytest.mark.parametrize("damage", [spoil, spoil_one])
def test_logits_that_are_not_finite_are_one_clear_line(
    path: Path, tmp_path: Path, damage: Any, n_seq: int, temperature: float
) -> None:
    bad = changed(path, tmp_path / "bad.gguf", tensors=damage)
    with opened(bad, n_seq=n_seq) as target:
        rows = Rows(target)
        rows.decode([3] * n_seq)
        assert target.native.best == [-1] * (3 * n_seq)
        with pytest.raises(NotFiniteError):
            target.candidates(0, 40)
        rows.clear()
        engine = Engine(target, None, n_seq=n_seq)
        request = Request([4, 5, 6], SamplingParams(temperature=temperature), 8, 0)
        for _ in range(2):
            with pytest.raises(NotFiniteError) as caught:
                engine.run([engine.begin(request)])
            assert "\n" not in str(caught.value)
            assert not any(slot.busy or slot.cached for slot in engine.slots)


def test_weights_of_the_target_that_are_no_numbers_do_not_blame_the_drafter(tmp_path: Path) -> None:
    def spoil_norm(tensors: dict[str, Tensor]) -> None:
        values, kind = tensors["blk.1.attn_norm.weight"]
        tensors["blk.1.attn_norm.weight"] = np.full_like(values, np.nan), kind

    target, drafter = mini_pair.pair()
    bad = changed(target, tmp_path / "bad.gguf", tensors=spoil_norm)
    with (
        pytest.raises(NotFiniteError),
        load(bad, drafter, n_ctx=128, n_gpu_layers=0, n_threads=1, quiet=True) as model,
    ):
        model.generate("def f(x):", max_tokens=8, draft_width=8)


@pytest.mark.parametrize("n_seq", [1, 3])
def test_recurrent_targets_have_a_best_as_well(recurrent: Path, n_seq: int) -> None:
    with opened(recurrent, n_seq=n_seq) as target:
        assert target.is_recurrent and target.max_width == 1
        rows = Rows(target)
        for widths in ([7, 3, 1], [1, 1, 1], [2, 0, 5], [16, 1, 3]):
            check_best(target, rows.decode(widths[:n_seq], 0.6))


def test_sequences_of_a_recurrent_target_do_not_see_each_other(recurrent: Path) -> None:
    """llama.cpp splits their batches, and gives the rows back in their order."""
    tokens = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    with opened(recurrent, n_seq=3) as together, opened(recurrent) as alone:
        together.decode(
            [token for seq in tokens for token in seq],
            [position for seq in tokens for position in range(len(seq))],
            [seq for seq, of_seq in enumerate(tokens) for _ in of_seq],
            [True] * 9,
        )
        best, row = [], 0
        for of_seq in tokens:
            n = len(of_seq)
            alone.clear(0)
            alone.decode(of_seq, range(n), [0] * n, [True] * n)
            best += alone.native.best
            for i in range(n):
                assert np.allclose(together.logits(row + i), alone.logits(i), atol=1e-3)
            row += n
        assert together.native.best == best


def test_a_recurrent_target_is_tapped_in_one_sequence_only(recurrent: Path) -> None:
    with opened(recurrent, tapped_layers=(1, 2)) as target:
        rows = Rows(target)
        check_best(target, rows.decode([9], 0.5))
        states = target.hidden_states()
        assert states.shape == (9, 2, target.n_embd) and np.isfinite(states).all()
        assert np.abs(states[:, 0] - states[:, 1]).max() > 0.1
    with pytest.raises(InputError, match="recurrent: its layers cannot be tapped for 2 sequences"):
        opened(recurrent, n_seq=2, tapped_layers=(1, 2))


def test_layers_that_are_not_there_are_refused(path: Path) -> None:
    for layer in (-1, 0, 4, 400):
        with pytest.raises(InputError, match=f"input of layer {layer}; .* 1 .. 3"):
            opened(path, tapped_layers=(1, layer))
