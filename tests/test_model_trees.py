"""A model that is loaded for draft trees, as a user meets it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_local import Model, demo, load
from dflash_local.engine.prefixes import PrefixStore
from dflash_local.errors import InputError

N = 24


@pytest.fixture(scope="module")
def trees() -> Iterator[Model]:
    with load(
        *demo.pair(),
        n_ctx=1024,
        n_seq=2,
        kv_type="q8_0",
        n_gpu_layers=0,
        n_threads=1,
        draft_shape="tree",
        quiet=True,
    ) as model:
        model.draft_width = 16
        yield model


@pytest.fixture(scope="module")
def prompt() -> str:
    return demo.prompts()["code"][0]


def test_a_stop_text_ends_where_it_does_in_plain_decoding(trees: Model, prompt: str) -> None:
    trees.forget()
    whole = trees.generate(prompt, draft_width=0, max_tokens=N)
    stop = whole.text[len(whole.text) // 4 :][:3]
    trees.forget()
    drafted = trees.generate(prompt, stop=stop, max_tokens=N)
    assert drafted.text == whole.text[: whole.text.index(stop)]
    assert drafted.finish_reason == "stop"
    assert drafted.stats.tree_rounds > 0


def test_requests_may_ask_for_chains(trees: Model, prompt: str) -> None:
    assert trees.generate(prompt, max_tokens=N).stats.tree_rounds > 0
    chained = trees.generate(prompt, draft_shape="chain", max_tokens=N)
    assert chained.stats.drafted and not chained.stats.tree_rounds
    with pytest.raises(InputError, match="draft_shape is 'star'; expected one of chain"):
        trees.generate(prompt, draft_shape="star")


@pytest.mark.slow
def test_a_prefix_from_the_store_can_fork(trees: Model, prompt: str) -> None:
    trees.forget()
    text = trees.tokenize(prompt) * 3
    plain = trees.generate(text, draft_width=0, max_tokens=N)
    trees.forget()
    caches = trees.engine.slots
    caches.store = PrefixStore(64 << 20)
    try:
        trees.generate(text, max_tokens=N)
        for other in range(2):  # both slots are taken by texts that have nothing in common with it
            trees.generate([30 + other] * 200, max_tokens=4)
        again = trees.generate(text, max_tokens=N)
        assert caches.reused["memory"] == 1
        assert again.stats.cached_tokens > len(text) // 2
        assert again.stats.tree_rounds > 0
        assert again.tokens[: N // 3] == plain.tokens[: N // 3]
    finally:
        caches.store = PrefixStore(0)
        trees.forget()


def test_a_shape_that_is_none_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InputError, match="draft_shape is 'bush'"):
        load("no such file", draft_shape="bush")  # type: ignore[arg-type]
