"""One request at a time: real answers of the tiny pair, plain and drafted in turn."""

from dataclasses import replace
from itertools import product

import pytest

from dflash_local import Model
from dflash_local.bench.measure.settings import CACHE_STATES, PLAIN, RunSettings, Variant
from dflash_local.bench.measure.single import Pace, SpeedRow, by_category
from dflash_local.bench.measure.speed import STAGES
from dflash_local.bench.prompts.case import Case, tokenized
from dflash_local.bench.prompts.prompt import built_in

VARIANTS = (Variant(), Variant(4), Variant(4, "tree"))
SETTINGS = RunSettings((0.0, 0.8), VARIANTS, CACHE_STATES, max_tokens=10)
N_PROMPTS = {"chat": 2, "code": 1}


@pytest.fixture(scope="module")
def cases(auto_model: Model) -> list[Case]:
    prompts = [
        prompt for category, n in N_PROMPTS.items() for prompt in built_in((category,), limit=n)
    ]
    return tokenized(auto_model, prompts, room=SETTINGS.max_tokens)[0]


@pytest.fixture(scope="module")
def rows(auto_model: Model, cases: list[Case]) -> list[SpeedRow]:
    (found, again) = by_category(auto_model, cases[:1], SETTINGS, Pace(lambda _line: None))
    return found + again


class Interrupting(Pace):
    """Presses Ctrl-C after so many answers."""

    def __init__(self, n: int) -> None:
        super().__init__(lambda _line: None)
        self._left = n

    def count(self, work: float) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("n_answers", "found"),
    [
        (1, []),
        (11, [("chat", 1)]),  # the first prompt has 8, the second is not complete
        (17, [("chat", 2)]),  # 16 answers to both
    ],
)
def test_what_was_measured_before_an_interruption_is_kept(
    auto_model: Model, cases: list[Case], n_answers: int, found: list[tuple[str, int]]
) -> None:
    settings = replace(SETTINGS, temperatures=(0.0,))
    rows: list[SpeedRow] = []
    with pytest.raises(KeyboardInterrupt):
        for new in by_category(auto_model, cases, settings, Interrupting(n_answers)):
            rows += new
    assert list(dict.fromkeys((row.category, row.n_prompts) for row in rows)) == found
    assert len(rows) == len(found) * len(VARIANTS) * len(CACHE_STATES)
    for row in rows:
        assert row.drafted is not None
        assert row.plain.n_answers == row.drafted.n_answers == row.n_prompts


@pytest.mark.slow
def test_every_combination_has_a_row_and_every_category_a_line(
    auto_model: Model, cases: list[Case]
) -> None:
    told: list[str] = []
    measured = by_category(auto_model, cases[1:], SETTINGS, Pace(told.append))
    rows = [row for category in measured for row in category]
    found = [(row.temperature, row.category, row.variant, row.cache) for row in rows]
    assert found == [*product(SETTINGS.temperatures, N_PROMPTS, VARIANTS, CACHE_STATES)]
    lines = [line.split(":")[0] for line in told if " left" not in line]
    assert lines == [f"{name}, temperature {t}" for t in ("0", "0.8") for name in N_PROMPTS]


def test_answers_too_short_to_be_timed_are_told(auto_model: Model, cases: list[Case]) -> None:
    settings = RunSettings(temperatures=(0.0,), variants=(Variant(4),), max_tokens=3)
    told: list[str] = []
    list(by_category(auto_model, cases[:1], settings, Pace(told.append)))
    assert told == ["chat, temperature 0: answers too short to be timed"]


def test_rows_hold_plain_and_drafted_answers_of_the_same_prompts(rows: list[SpeedRow]) -> None:
    for row in rows:
        assert row.drafted is not None
        assert row.n_prompts == row.plain.n_answers == row.drafted.n_answers == 1
        assert row.plain.ttft_s is not None and row.plain.ttft_s.low > 0
        assert set(row.plain.stage_s) == set(STAGES)
        # The pass finds the likeliest token itself.
        assert row.plain.stage_s["verify"] > row.plain.stage_s["sample"] >= 0
        assert row.differences == []
        assert row.temperature or row.plain.n_tokens == row.drafted.n_tokens


def test_each_variant_is_compared_with_the_others(rows: list[SpeedRow]) -> None:
    for row in rows:
        assert set(row.over) == set(VARIANTS) - {row.variant}
        for other in (each for each in rows if each.variant in row.over):
            if (other.temperature, other.cache) == (row.temperature, row.cache):
                gain = row.over[other.variant].median * other.over[row.variant].median
                assert gain == pytest.approx(1)


def test_both_shapes_are_measured_on_one_model_with_their_width(rows: list[SpeedRow]) -> None:
    for row in (row for row in rows if row.variant.width == 4):
        found = row.acceptance
        assert found.mean_length and 1 <= found.mean_length <= 4 and row.forced is None
        assert max(found.lengths) <= 4 and max(found.stats.widths) <= 4
        assert found.nodes and found.depth and found.branches and found.side_share is not None
        assert 1 <= found.depth <= found.nodes <= 3
        if row.variant.shape == "chain":
            assert (found.depth, found.branches, found.side_share) == (found.nodes, 1, 0)
            assert found.stats.tree_rounds == 0
    trees = [row.acceptance.stats for row in rows if row.variant == Variant(4, "tree")]
    assert sum(stats.tree_rounds for stats in trees) > 0


def test_what_drafts_are_worth_is_shown_even_where_none_are_made(rows: list[SpeedRow]) -> None:
    for row in (row for row in rows if row.variant.width == "auto"):
        assert row.drafting is not None
        assert row.shown.mean_length is not None and row.shown.mean_length >= 1
        if row.forced:
            assert row.forced.plain_rounds < row.forced.stats.rounds


def test_without_a_drafter_there_are_plain_rows(auto_model: Model, cases: list[Case]) -> None:
    settings = replace(SETTINGS, variants=(), temperatures=(0.0,))
    (rows,) = by_category(auto_model, cases[:1], settings, Pace(lambda _line: None))
    assert [(row.variant, row.drafted, row.ratio) for row in rows] == [(PLAIN, None, None)] * 2
