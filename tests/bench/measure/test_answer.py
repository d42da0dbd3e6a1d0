"""One measured answer, and where two answers part."""

import pytest

from dflash_local import Model
from dflash_local.bench.measure.settings import PLAIN, Variant
from dflash_local.bench.measure.speed import ask, first_difference


def test_an_answer_has_its_tokens_and_times(model: Model) -> None:
    asked = model.tokenize("def add(a, b):\n")
    options = {"temperature": 0.0, "seed": 0, "max_tokens": 12}
    plain = ask(model, asked, PLAIN, **options)
    assert plain.stats.emitted == len(plain.tokens) == 12
    assert plain.counts and plain.stats.ttft_s > 0 and not plain.stats.drafted
    model.forget()
    drafted = [ask(model, asked, Variant(4), **options) for _ in range(2)]
    assert [answer.tokens for answer in drafted] == [plain.tokens] * 2
    # The second one hits the prefix of the first.
    assert [answer.stats.cached_tokens for answer in drafted] == [0, len(asked) - 1]
    assert max(drafted[0].stats.widths) <= 4


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)],
)
def test_first_difference(left: list[int], right: list[int], at: int | None) -> None:
    assert first_difference(left, right) == at
