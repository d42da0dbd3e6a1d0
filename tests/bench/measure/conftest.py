"""The tiny pair as the benchmark loads it: ready for chains and for trees."""

from collections.abc import Iterator

import pytest

import tiny_coder
from dflash_local import Model, load


@pytest.fixture(scope="session")
def auto_model() -> Iterator[Model]:
    """On one thread: fastest where other tests need the rest of the cores."""
    options = {"n_ctx": 2048, "n_gpu_layers": 0, "n_threads": 1}
    with load(
        *tiny_coder.pair(), quiet=True, draft_shape="auto", kv_type="q8_0", **options
    ) as loaded:
        yield loaded
