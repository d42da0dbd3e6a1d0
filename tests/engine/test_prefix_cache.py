"""A request that begins as the one before it computes only what is new, and answers the same."""

import threading
from typing import Any

import pytest

from dflash_local import Model, Result
from dflash_local.engine.engine import Engine
from dflash_local.prefixes.reuse import LEAST_GAIN, common_prefix
from long_text import PYTHON_SOURCE
from shapes import assert_as_well_drafted

N = 40


@pytest.fixture(autouse=True)
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are better each time, as their chances are learnt: no drafts would be as the first."""
    monkeypatch.setattr(Engine, "_copier", lambda *_: None)


def cold(model: Model, prompt: str | list[int], **options: Any) -> Result:
    model.forget()
    result = model.generate(prompt, **options)
    assert result.stats.cached_tokens == 0
    return result


def source(model: Model, n: int) -> list[int]:
    """The first `n` tokens of a Python file."""
    return model.tokenize(PYTHON_SOURCE[: 8 * n])[:n]


def test_growing_and_shrinking_prompts(either_model: Model) -> None:
    model = either_model
    text = source(model, 500)
    lengths = (500, 120, 119, 300, 1, 450, 2)
    expected = {n: cold(model, text[:n], max_tokens=12).tokens for n in set(lengths)}
    model.forget()
    cached: list[int] = []
    for n in lengths:
        result = model.generate(text[:n], max_tokens=12)
        assert result.tokens == expected[n]
        shared = min(common_prefix(cached, text[:n]), n - 1)
        a_handful = shared < min(LEAST_GAIN, n - 1)
        assert result.stats.cached_tokens == (0 if a_handful else shared)
        cached = text[:n] + result.tokens[:-1]


@pytest.mark.parametrize(("width", "cancelled"), [(0, False), (0, True), (16, True)])
def test_a_drafting_request_after_another_one(
    either_model: Model, width: int, cancelled: bool
) -> None:
    """A plain one leaves the drafter without rows; they are computed again, not done without."""
    model = either_model
    prompt = source(model, 300)
    expected = cold(model, prompt, max_tokens=N)
    model.forget()
    cancel = threading.Event()
    most = None if cancelled else N
    chunks = model.stream(prompt, max_tokens=most, draft_width=width, cancel=cancel)
    for _, chunk in zip(range(4), chunks, strict=False):
        assert chunk.finish_reason is None
    if cancelled:
        cancel.set()
    assert ([chunk.finish_reason for chunk in chunks][-1] == "cancelled") == cancelled
    again = model.generate(prompt, max_tokens=N)
    assert again.stats.cached_tokens == (len(prompt) - 1 if width else 0)
    assert again.tokens == expected.tokens
    assert_as_well_drafted(again.stats, expected.stats)
    # And the other way round, where the target has all that it needs.
    plain = model.generate(prompt, max_tokens=N, draft_width=0)
    assert plain.tokens == expected.tokens
    assert plain.stats.cached_tokens == len(prompt) - 1
