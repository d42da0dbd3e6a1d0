"""The tensors of a shape add up to what users of llama.cpp download."""

import pytest

from lab.shapes.shape import find_shape
from lab.shapes.tensors import find_quant, target_tensors


@pytest.mark.parametrize(
    ("name", "quant", "gigabytes"),
    [
        ("qwen3-8b", "Q4_K_M", 5.03),
        ("qwen3-8b", "Q8_0", 8.71),
        ("qwen3-4b", "Q4_K_M", 2.50),
        ("qwen3-30b-a3b", "Q4_K_M", 18.6),
        ("llama-3.1-8b", "Q4_K_M", 4.92),
        ("gpt-oss-20b", "MXFP4", 12.1),
        ("gpt-oss-120b", "MXFP4", 63.4),
        ("qwen3-coder-next", "Q4_K_M", 48.5),
        ("lfm2.5-24b-a2b", "Q4_K_M", 14.4),
    ],
)
def test_a_target_is_as_large_as_the_real_one(name: str, quant: str, gigabytes: float) -> None:
    tensors = target_tensors(find_shape(name), find_quant(quant))
    assert sum(tensor.n_bytes for tensor in tensors) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [("qwen3.6-27b", 149.6), ("qwen3.6-35b-a3b", 62.8), ("qwen3-coder-next", 75.4)],
)
def test_a_recurrent_state_is_as_large_as_the_real_one(name: str, mebibytes: float) -> None:
    shape, n_values = find_shape(name), 0
    assert shape.delta_net
    for tensor in target_tensors(shape, find_quant("Q4_K_M")):
        if tensor.name.endswith("ssm_conv1d.weight"):
            kernel, width = tensor.shape
            n_values += (kernel - 1) * width
        elif tensor.name.endswith("ssm_a"):
            n_values += tensor.shape[0] * shape.delta_net.head_dim**2
    assert 4 * n_values / 2**20 == pytest.approx(mebibytes, abs=0.05)
