"""Images as ids of a text: equal for equal images, and never cut."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dflash_local.target_model.images import (
    MOST_MORE,
    Image,
    ImageText,
    Prompt,
    ids_of,
    is_inner,
    more_cells,
    n_cells,
    whole,
)

SIZES = st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 992, MOST_MORE]))


def _image(n_positions: int, n_more: int) -> Image:
    return Image(n_positions + n_more, n_positions, lambda _: pytest.fail("nobody asked for it"))


@given(st.binary(min_size=1, max_size=32), SIZES)
def test_an_image_has_an_id_of_32_bits_for_each_position(key: bytes, size: tuple[int, int]) -> None:
    ids = ids_of(key, *size)
    assert len(ids) == size[0]
    assert all(-(2**31) <= each < 0 for each in ids)
    assert [is_inner(each) for each in ids] == [i > 0 for i in range(len(ids))]
    assert ids == ids_of(key, *size)


def test_other_images_have_other_ids() -> None:
    assert len({tuple(ids_of(bytes([i]), 4, 0)) for i in range(200)}) == 200


@given(st.lists(st.one_of(SIZES, st.integers(0, 9)), max_size=12))
def test_cells_are_counted_and_no_image_is_cut(parts: list[tuple[int, int] | int]) -> None:
    text, edges, n_more = ImageText(), {0}, 0
    for i, part in enumerate(parts):
        if isinstance(part, int):
            text.tokens += [part]
        else:
            text.add_image(_image(*part), bytes([i]))
            n_more += part[1]
        edges.add(len(text.tokens))
    assert n_cells(text.tokens) == len(text.tokens) + n_more
    assert {end for end, _ in more_cells(text.tokens)} <= edges
    for length in range(len(text.tokens) + 1):
        assert whole(text.tokens, length) == max(edge for edge in edges if edge <= length)


def test_a_prompt_behind_others_knows_where_its_images_are() -> None:
    text = ImageText([1, 2])
    text.add_image(_image(3, 0), b"a")
    prompt = Prompt(text).behind([7, 8, 9])
    assert prompt[:5] == [7, 8, 9, 1, 2]
    assert list(prompt.images) == [5]
