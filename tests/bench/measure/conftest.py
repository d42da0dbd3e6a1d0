"""The mini pair as the benchmark loads it: ready for chains and for trees."""

from collections.abc import Iterator

import pytest

import mini_pair
from dflash_local import Model, load


@pytest.fixture(scope="session")
def auto_model() -> Iterator[Model]:
    """On one thread: fastest where other tests need the rest of the cores."""
    options = {"n_ctx": 2048, "n_gpu_layers": 0, "n_threads": 1, "quiet": True}
    with load(*mini_pair.pair(), draft_shape="auto", kv_type="q8_0", **options) as loaded:
        yield loaded
