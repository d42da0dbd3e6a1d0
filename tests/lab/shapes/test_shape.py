"""The shapes by name, and their taps."""

import pytest

from dflash_local.errors import InputError
from lab.shapes.shape import PAIR_SHAPES, find_shape
from mini_shapes import DENSE, HYBRID


def test_taps_are_those_of_the_published_drafters() -> None:
    assert PAIR_SHAPES["qwen3-8b"].taps == (2, 10, 18, 26, 34)
    assert PAIR_SHAPES["qwen3-coder-30b-a3b"].taps == (2, 13, 24, 35, 46)


@pytest.mark.parametrize("name", PAIR_SHAPES)
def test_every_shape_has_five_taps_inside_the_target(name: str) -> None:
    shape = find_shape(name)
    assert len(shape.taps) == 5
    assert max(shape.taps) < shape.n_layer


@pytest.mark.parametrize("n_layer", [0, 2, 513, -1])
def test_a_number_of_layers_that_nothing_runs_is_refused(n_layer: int) -> None:
    with pytest.raises(InputError, match="expected 3 to 512"):
        DENSE.with_layers(n_layer)


def test_a_hybrid_shape_keeps_a_layer_of_attention() -> None:
    with pytest.raises(InputError, match="expected 4 to 512"):
        HYBRID.with_layers(3)
