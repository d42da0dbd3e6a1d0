"""Several requests at once, plain and drafted in turn."""

from dflash_local import Model
from dflash_local.bench.measure.concurrent import measure_concurrent
from dflash_local.bench.measure.settings import RunSettings
from dflash_local.bench.prompts.case import Case


def test_a_prompt_that_comes_again_is_computed_again(auto_model: Model) -> None:
    """As llama-server is asked to: else ours would be faster by what it does not do."""
    cases = [Case("chat", 0, auto_model.tokenize("def f(x):\n" * 8))]
    settings = RunSettings(temperatures=(0.0,), variants=(), max_tokens=4)
    rows, _ = measure_concurrent(auto_model.engine, cases, [1], settings, lambda _line: None)
    stats = rows[0].plain.acceptance.stats
    assert stats.prompt_tokens == 4 * len(cases[0].tokens)  # two requests, twice
    assert stats.cached_tokens == 0


def test_what_the_context_cannot_hold_at_once_is_told(auto_model: Model) -> None:
    settings = RunSettings(max_tokens=2040)
    cases = [Case("chat", 0, auto_model.tokenize("def f(x):\n"))]
    rows, notes = measure_concurrent(auto_model.engine, cases, [1], settings, lambda _line: None)
    assert rows == []
    assert "left out" in notes[0] and str(auto_model.n_ctx) in notes[0]
