"""An answer that goes on where the context is full: of its text the older half is left out, and the
rest is decoded again, with drafts as without."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import mini_pair
from adversarial import ScriptedDrafter
from dflash_local import Model, load
from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.target_model.target import Target
from long_text import PYTHON_SOURCE
from pair_engine import answer
from shapes import assert_equal, exact_model, exact_target

N_CTX, N = 256, 164
"""Such an answer fills the context, and once more after the first of two shifts."""
DRAWN: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "seed": 4}}


@pytest.fixture(scope="module")
def small(shape: DraftShape) -> Iterator[Model]:
    with exact_model(shape, n_ctx=N_CTX) as model:
        yield model


@pytest.fixture(scope="module")
def target(shape: DraftShape) -> Iterator[Target]:
    with exact_target(shape, n_ctx=N_CTX) as opened:
        yield opened


@pytest.fixture(scope="module")
def source(small: Model) -> list[int]:
    return small.tokenize(PYTHON_SOURCE)


def after_shifts(prompt: list[int], tokens: list[int], n_keep: int, n_discard: int) -> list[int]:
    """The text as it is after all tokens but the last, by llama-server's rule."""
    text = list(prompt)
    for token in tokens:
        if len(text) > N_CTX:
            n = n_discard or (N_CTX - n_keep) // 2
            del text[n_keep : n_keep + n]
        text.append(token)
    return text[:-1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize(
    ("n_prompt", "n_keep", "n_discard"), [(240, 0, 0), (180, -1, 0), (240, 16, 100)]
)
def test_drafted_answers_are_the_plain_ones(
    small: Model, source: list[int], drawn: str, n_prompt: int, n_keep: int, n_discard: int
) -> None:
    prompt = source[:n_prompt]
    options: dict[str, Any] = {"max_tokens": N, "ignore_eos": True, **DRAWN[drawn]}
    options |= {"context_shift": True, "n_keep": n_keep, "n_discard": n_discard}
    small.forget()
    plain = small.generate(prompt, draft_width=0, **options)
    assert len(plain.tokens) == N and plain.finish_reason == "length"
    assert plain.stats.shifts >= 2
    small.forget()
    drafted = small.generate(prompt, draft_width=8, **options)
    assert_equal(drafted, plain)
    assert drafted.stats.accepted and drafted.stats.shifts == plain.stats.shifts
    # What was left out has left no trace: the text that stayed goes on in the same way.
    n_keep = len(prompt) if n_keep < 0 else n_keep
    text = after_shifts(prompt, plain.tokens, n_keep, n_discard)
    assert small.engine.slots[0].cached == text
    if drawn == "greedy":
        n = len(text) - 12
        small.forget()
        again = small.generate(text[:n], draft_width=0, max_tokens=12, ignore_eos=True)
        assert again.tokens == text[n:]


@pytest.mark.one_in(2)
def test_bad_drafts_change_nothing(target: Target, shape: DraftShape) -> None:
    prompt = target.vocabulary.tokenize(PYTHON_SOURCE)[:240]
    ends = {token: float("-inf") for token in target.vocabulary.ends}
    asked: dict[str, Any] = {"n_keep": 8, "logit_bias": ends, "temperature": 0.9, "seed": 4}
    plain = answer(Engine(target, None), prompt, 0, N, **asked)
    target.clear(0)
    drawn = random.Random(3)

    def script(_at: int, anchor: int, n: int) -> Draft:
        return Draft.chain([drawn.choice([anchor, *plain.tokens]) for _ in range(n)])

    drafted = answer(Engine(target, ScriptedDrafter(script)), prompt, 6, N, shape=shape, **asked)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted
    assert drafted.stats.shifts == plain.stats.shifts > 1


@pytest.mark.one_in(2)
def test_several_at_once_all_come_to_their_end(shape: DraftShape) -> None:
    with exact_model(shape, n_ctx=N_CTX, n_seq=3) as model:
        prompts = [model.tokenize(PYTHON_SOURCE)[at:][:220] for at in (0, 100, 200)]
        options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "context_shift": True}
        with ThreadPoolExecutor(3) as pool:
            told = list(pool.map(lambda p: model.generate(p, **options), prompts))
        assert [len(result.tokens) for result in told] == [50] * 3
        assert any(result.stats.shifts for result in told)


def test_an_exact_model_keeps_no_row_of_a_shifted_answer() -> None:
    """Passes of answers are not those of a prompt, which may begin with the same text."""
    settings: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": 32, "n_gpu_layers": 0, "n_threads": 1}
    with load(mini_pair.pair()[0], exact=True, quiet=True, **settings) as model:
        prompt = model.tokenize(PYTHON_SOURCE)[:200]
        for n_keep, n_cached in ((0, 0), (100, 96), (-1, 192)):
            options: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "n_keep": n_keep}
            told = model.generate(prompt, context_shift=True, **options)
            assert told.stats.shifts
            assert model.engine.slots[0].cached == prompt[:n_cached]
