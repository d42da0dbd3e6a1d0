"""The rows of a converted tensor are the checkpoint's, in the order that llama.cpp wants."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import hf_drafters
from dflash_local.convert.config.drafter_config import read_config
from dflash_local.convert.files.checkpoint import Checkpoint, TensorEntry
from dflash_local.convert.tensors.names import absolute_ids, plan_tensors
from dflash_local.convert.tensors.plan import TensorPlan, planned_rows
from dflash_local.errors import FileError


def checkpoint(folder: Path, name: str) -> tuple[Checkpoint, list[TensorPlan]]:
    opened = Checkpoint.open(hf_drafters.write(folder, name))
    target = hf_drafters.target_facts(name)
    config = read_config(hf_drafters.config(name), target=target)
    return opened, plan_tensors(config, opened.tensors)


@pytest.mark.parametrize("name", ["plain", "dflash2", "dspark", "gemma4", "swa-sinks", "gpt-oss"])
def test_rows_are_the_checkpoints(tmp_path: Path, name: str) -> None:
    source, plans = checkpoint(tmp_path, name)
    weights = hf_drafters.weights(name)
    for plan in plans:
        if plan.source:
            rows = planned_rows(source, plan, 0, plan.n_rows)
            assert rows.shape == (plan.n_rows, plan.shape[0])
            assert np.array_equal(rows.ravel(), weights[plan.source].ravel()), plan.name


def rotated(vectors: NDArray[np.float64], interleaved: bool) -> NDArray[np.float64]:
    """RoPE at position 5 of vectors [..., 16]: in pairs next to each other, or of two halves."""
    angles = 5.0 * 100.0 ** (-np.arange(8) / 8)
    first = vectors[..., 0::2] if interleaved else vectors[..., :8]
    second = vectors[..., 1::2] if interleaved else vectors[..., 8:]
    turned = (
        first * np.cos(angles) - second * np.sin(angles),
        first * np.sin(angles) + second * np.cos(angles),
    )
    return np.concatenate(turned, axis=-1)


def test_permuted_heads_have_the_same_scores(tmp_path: Path) -> None:
    """A permutation's purpose: scores of interleaved RoPE before equal those of halves after."""
    source, plans = checkpoint(tmp_path, "dspark-interleaved")
    weights = hf_drafters.weights("dspark-interleaved")
    by_name = {plan.name: plan for plan in plans}
    hidden = np.random.default_rng(1).standard_normal(64)

    def scores(matrices: list[NDArray[Any]], interleaved: bool) -> NDArray[np.float64]:
        q, k, q_norm, k_norm = (matrix.astype(np.float64) for matrix in matrices)
        queries = rotated((q @ hidden).reshape(4, 16) * q_norm, interleaved)
        keys = (k @ hidden).reshape(2, 16) * k_norm
        rolled = keys[:, 0::2] if interleaved else keys[:, :8]
        paired = keys[:, 1::2] if interleaved else keys[:, 8:]
        found: NDArray[np.float64] = queries @ np.concatenate((rolled, paired), axis=-1).T
        return found

    stems = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")
    written = [by_name[f"blk.1.{stem}.weight"] for stem in stems]
    assert [plan.permute_heads for plan in written] == [4, 2, 1, 1]
    before = scores([weights[plan.source] for plan in written], interleaved=True)
    rows = [planned_rows(source, plan, 0, plan.n_rows) for plan in written]
    rows[2:] = [vector[0] for vector in rows[2:]]
    assert np.allclose(scores(rows, interleaved=False), before)
    untouched = by_name["blk.1.attn_v.weight"]
    assert untouched.permute_heads == 0


def test_biases_are_permuted_as_the_rows_of_their_weights() -> None:
    raw = hf_drafters.config("gpt-oss") | {"rope_is_neox_style": False}
    config = read_config(raw, target=hf_drafters.target_facts("gpt-oss"))
    weights = hf_drafters.weights("gpt-oss")
    tensors = {
        name: TensorEntry(name, "F32", values.shape, Path("model.safetensors"), 0, values.nbytes)
        for name, values in weights.items()
    }
    plans = {plan.name: plan for plan in plan_tensors(config, tensors)}
    for part in ("q", "k", "v", "output"):
        bias = plans[f"blk.1.attn_{part}.bias"]
        weight = plans[f"blk.1.attn_{part}.weight"]
        found = planned_rows(Held(weights[bias.source]), bias, 0, 1)[0]
        # a column of the weight in the bias's place goes where the bias goes
        as_column = np.ascontiguousarray(weights[bias.source][:, None])
        column = TensorPlan("c", "c", (1, len(as_column)), weight.permute_heads)
        assert np.array_equal(planned_rows(Held(as_column), column, 0, len(found))[:, 0], found)
        assert (bias.permute_heads > 0) == (part in ("q", "k"))


class Held:
    """A checkpoint in memory, which notes the rows asked for."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values
        self.most = 0

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        assert 0 <= start <= stop <= len(self.values)
        self.most = max(self.most, stop - start)
        return self.values[start:stop]


@given(start=st.integers(0, 64), count=st.integers(0, 64), heads=st.sampled_from([0, 4]))
def test_a_piece_of_a_tensor_equals_that_of_the_whole(start: int, count: int, heads: int) -> None:
    stop = min(64, start + count)
    held = Held(np.arange(64 * 3, dtype=np.float32).reshape(64, 3))
    plan = TensorPlan("m", "m", (3, 64), permute_heads=heads)
    piece = planned_rows(held, plan, start, stop)
    assert held.most <= stop - start + (30 if heads else 0)
    assert np.array_equal(piece, planned_rows(held, plan, 0, 64)[start:stop])
    block = Held(np.arange(2 * 32 * 3, dtype=np.float32).reshape(2, 32, 3))
    cube = TensorPlan("c", "c", (3, 32, 2))
    assert np.array_equal(
        planned_rows(block, cube, start, stop), block.values.reshape(64, 3)[start:stop]
    )


def test_frequency_factors_of_llama3(tmp_path: Path) -> None:
    # as llama.cpp's converter for Llama 3.1 computes them
    source, plans = checkpoint(tmp_path, "llama3")
    plan = next(plan for plan in plans if plan.name == "rope_freqs.weight")
    rows = planned_rows(source, plan, 0, 1)
    assert rows.dtype == np.float32
    assert rows.tolist() == [[1.0, 1.0, 1.0, 1.0, 2.6945300102233887, 8.0, 8.0, 8.0]]


def test_factors_make_up_for_the_rounded_ramp_of_yarn() -> None:
    """Of gpt-oss: 64 dimensions, theta 150000, 32 times 4096 tokens."""
    scaling = hf_drafters.config("gpt-oss")["rope_scaling"] | {"truncate": False}
    raw = hf_drafters.config("gpt-oss") | {"head_dim": 64, "rope_scaling": scaling}
    rope = read_config(raw, target=hf_drafters.target_facts("gpt-oss")).rope
    low, high = (
        64 * np.log(4096 / (beta * 2 * np.pi)) / (2 * np.log(150000)) for beta in (32.0, 1.0)
    )
    assert (low, high) == pytest.approx((8.0928, 17.3980), abs=1e-3)

    def shares(low: float, high: float) -> NDArray[np.float64]:
        blend = np.clip((np.arange(32) - low) / (high - low), 0, 1)
        found: NDArray[np.float64] = (1 - blend) + blend / 32
        return found

    factors = np.array(rope.frequency_factors())
    assert factors[[0, 8, 18, 31]].tolist() == pytest.approx([1, 1, 1, 1])
    assert factors.max() > 1.5
    assert np.allclose(shares(8, 18) / factors, shares(low, high))
    assert not read_config(
        hf_drafters.config("gpt-oss"), target=hf_drafters.target_facts("gpt-oss")
    ).rope.frequency_factors()


def test_dimensions_that_gemma4_does_not_rotate(tmp_path: Path) -> None:
    source, plans = checkpoint(tmp_path, "gemma4")
    plan = next(plan for plan in plans if plan.name == "rope_freqs.weight")
    assert planned_rows(source, plan, 0, 1).tolist() == [[1.0] * 4 + [float(np.float32(1e30))] * 12]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 0, 300], "maps row 2 to token 302, expected 0 to 255"),
        ([-1], "maps row 0 to token -1"),
        ([5, 4], "maps several rows to one token"),
    ],
)
def test_ids_that_lie(offsets: list[int], message: str) -> None:
    with pytest.raises(FileError, match=message):
        absolute_ids(np.array(offsets, dtype=np.int64), 256)
