"""Headers of the real shapes: their weights are gigabytes."""

import pytest

from dflash_local.errors import InputError
from lab.shapes.file import drafter_file, target_file
from lab.shapes.shape import PAIR_SHAPES, find_shape


@pytest.mark.parametrize("name", PAIR_SHAPES)
def test_a_real_shape_is_a_pair(name: str) -> None:
    shape = find_shape(name)
    quant = "MXFP4" if name.startswith("gpt-oss") else "Q4_K_M"
    target, drafter = target_file(shape, quant), drafter_file(shape)
    assert target.header.kv_data[0][f"{shape.architecture}.block_count"].value == (
        shape.n_layer + shape.n_further
    )
    for file in (target, drafter):
        tokens = file.header.kv_data[0]["tokenizer.ggml.tokens"].value
        assert len(tokens) == len(set(tokens)) == shape.n_vocab
    assert drafter.header.kv_data[0]["dflash.target_layers"].value == list(shape.taps)


def test_a_quantisation_of_experts_needs_experts() -> None:
    shape = find_shape("qwen3-8b")
    with pytest.raises(InputError, match="qwen3-8b is none"):
        target_file(shape, "MXFP4")
