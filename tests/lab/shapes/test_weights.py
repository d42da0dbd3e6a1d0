"""Random weights are what ggml would make of a normal distribution."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from lab.shapes.writer import RandomWeights


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "BF16", "MXFP4", "F32"])
def test_values_are_small_and_finite(name: str) -> None:
    kind, std = Type[name], 0.01
    _, size = gguf.GGML_QUANT_SIZES[kind]
    pieces = RandomWeights(std).take(kind, 4000 * size)
    raw = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    if name == "F32":
        values = raw.view(np.float32)
    else:
        values = gguf.quants.dequantize(raw.reshape(1000, -1), kind).reshape(-1)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=0.1)
    assert abs(values.mean()) < 0.1 * std
    assert abs(values).max() < 8 * std


def test_no_two_rows_of_a_vocabulary_are_equal() -> None:
    """Else their logits are, and sampling takes longer than it does for trained weights."""
    n_rows, row = 40_000, 2 * gguf.GGML_QUANT_SIZES[Type.Q6_K][1]
    weights = RandomWeights(0.02)
    list(weights.take(Type.Q6_K, 1000 * row))
    pieces = weights.take(Type.Q6_K, n_rows * row)
    raw = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
    assert len({line.tobytes() for line in raw.reshape(n_rows, row)}) == n_rows
