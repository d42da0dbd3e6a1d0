"""A round's rows are those that bring most for their time, whatever the costs look like."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.controller.controller import Rows

MOST = 63

chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=MOST).map(
    lambda found: sorted(found, reverse=True)
)
few = st.lists(st.floats(0.0, 1.0), max_size=15).map(lambda found: sorted(found, reverse=True))
curves = st.lists(st.floats(1.0, 20.0), min_size=MOST + 1, max_size=MOST + 1)
rates = st.floats(0.0, 2.0)
usual_counts = st.sampled_from([0, 5])


def values(found: list[float], passes: list[float], rate: float) -> list[float]:
    """By drafted nodes: expected tokens, less what the time is worth."""
    tokens = accumulate(found, initial=0.0)
    return [got - rate * (s - passes[0]) for got, s in zip(tokens, passes, strict=False)]


@given(usual_counts, chances, curves, rates)
def test_no_width_is_better_than_the_chosen_one(
    usual: int, found: list[float], passes: list[float], rate: float
) -> None:
    """Costs may rise and fall as they like; nothing is paid for another row count."""
    choice = Rows()
    choice.price(1, passes, rate, 0.0)
    (width,) = choice.choose([found], 1, usual)
    known = values(found, passes, rate)
    assert known[width - 1] == pytest.approx(max(known), abs=1e-9)


@given(usual_counts, chances, curves, rates, st.integers(1, 1 + MOST), st.floats(0.0, 5.0))
def test_what_a_new_graph_costs_is_all_that_can_be_lost(
    usual: int, found: list[float], passes: list[float], rate: float, last: int, switch_s: float
) -> None:
    choice = Rows()
    choice.price(1, passes, rate, switch_s)
    (width,) = choice.choose([found], last, usual)
    known = values(found, passes, rate)
    assert max(known) - known[width - 1] <= 2 * rate * switch_s + 1e-9


@given(usual_counts, st.lists(few, min_size=2, max_size=4), curves, rates)
def test_sequences_share_the_rows_of_a_pass(
    usual: int, found: list[list[float]], passes: list[float], rate: float
) -> None:
    """As many in all as are best for all, and each row where its chance is greatest."""
    choice = Rows()
    choice.price(len(found), passes, rate, 0.0)
    widths = choice.choose(found, None, usual)
    merged = sorted((chance for each in found for chance in each), reverse=True)
    known = values(merged, passes, rate)
    kept = [
        chance for each, width in zip(found, widths, strict=True) for chance in each[: width - 1]
    ]
    assert sum(kept) == pytest.approx(sum(merged[: len(kept)]))
    assert known[len(kept)] == pytest.approx(max(known), abs=1e-9)


@given(usual_counts, st.floats(0.05, 0.95), st.floats(0.1, 1.0), st.integers(2, MOST))
def test_it_fills_up_to_the_next_cheaper_width(
    usual: int, survival: float, rate: float, cheap: int
) -> None:
    """Rows dearer and dearer, but for one count that costs no more than a few."""
    found = [survival**j for j in range(1, MOST + 1)]
    passes = [1.0 + 0.5 * n for n in range(MOST + 1)]
    dear = Rows()
    dear.price(1, passes, rate, 0.0)
    (before,) = dear.choose([found], None, usual)
    passes[cheap] = passes[min(before - 1, cheap)]
    filled = Rows()
    filled.price(1, passes, rate, 0.0)
    (width,) = filled.choose([found], None, usual)
    assert width == (1 + cheap if cheap > before - 1 else before)


def test_the_usual_count_is_that_of_usual_drafts() -> None:
    """Of one draft much better or worse than these, another count is verified only if that pays
    the way there and back."""
    choice = Rows()
    choice.price(1, [1.0 + 0.01 * n for n in range(MOST + 1)], 1.0, 2.0)
    for last in (3, 9, None):
        assert choice.choose([[0.9] * 8], last, 8) == [9]
        assert choice.choose([[0.9] * 8 + [0.05] * 40], last, 8) == [9]
    for last in (9, None):
        assert choice.choose([[0.005] * MOST], last, 8) == [9]
    assert choice.choose([[0.9] * MOST], 9, 8) == [1 + MOST]


def test_a_doubtful_copy_is_not_tried_for_the_sake_of_a_sure_one() -> None:
    """They may be equally long, and the rounds of the sure one say nothing of the doubtful one."""
    choice = Rows()
    choice.price(1, [4.0 + 0.1 * k for k in range(MOST + 1)], 0.5, 8.0)
    last = 1
    for _ in range(30):
        (last,) = choice.choose([[0.99] * MOST], last)
    assert last == 1 + MOST
    assert choice.choose([[0.06] + [0.01] * (MOST - 1)], 1) == [1]


@pytest.mark.parametrize("usual", [0, 3])
def test_where_all_get_as_many_rows_a_row_is_paid_for_each(usual: int) -> None:
    """A sure text beside a hopeless one: each of its rows makes one of the other dearer, too."""
    sure, hopeless = [0.9**j for j in range(1, 16)], [0.0] * 15
    passes = [1.0 + 0.3 * k for k in range(31)]
    alone, equal, padded = Rows(), Rows(equal=True), Rows(pads=True)
    for choice in (alone, equal, padded):
        choice.price(2, passes, 1.0, 0.0)
    assert alone.choose([sure, hopeless], None, usual) == [12, 1]  # while 0.9^j > 0.3
    for choice in (equal, padded):
        assert choice.choose([sure, hopeless], None, usual) == [5, 5]  # while 0.9^j > 0.6
        assert choice.choose([sure, sure], None, usual) == [12, 12]
        assert choice.choose([hopeless, []], None, usual) == [1, 1]
    # Beside one that has no drafts, only a padded pass has a row more for it.
    assert padded.choose([sure, []], None, usual) == [5, 5]
    assert equal.choose([sure, []], None, usual) == [12, 1]


def test_drafts_come_in_few_numbers_of_rows_where_each_has_a_graph_to_make() -> None:
    """Powers of two, and all of a draft."""
    choice = Rows(few=True)
    choice.price(1, [1.0 + 0.3 * k for k in range(16)], 1.0, 0.0)
    for survival, n in ((0.2, 1), (0.4, 2), (0.75, 4), (0.85, 8), (0.95, 11)):
        draft = [survival**j for j in range(1, 11)]
        assert choice.choose([draft], None) == [n]


def test_a_count_that_cannot_come_again_is_not_kept() -> None:
    """Two sequences that get as many rows each, after a pass of five."""
    choice = Rows(equal=True)
    choice.price(2, [1.0 + 0.3 * k for k in range(31)], 1.0, 9.0)
    sure = [0.9**j for j in range(1, 16)]
    assert choice.choose([sure, sure], 5) == [1, 1]
    assert choice.choose([sure, sure], 6) == [3, 3]


def test_a_copy_pays_the_way_back_to_plain_passes() -> None:
    """Copies that come one at a time are each worth more than a new graph, and less than two."""
    choice = Rows()
    choice.price(1, [4.0] * (MOST + 1), 0.5, 8.0)
    assert choice.choose([[0.9] * 6], 1) == [1]
    assert choice.choose([[0.9] * 12], 1) == [13]
    assert choice.choose([[0.9] * 6], 30) == [7]


@given(
    st.lists(few, min_size=1, max_size=4),
    curves,
    st.floats(0.05, 2.0),
    st.sampled_from([None, 0, 1, 5, 20, 200]),
    st.floats(0.0, 2.0),
    st.sampled_from([{}, {"equal": True}, {"pads": True}]),
    st.integers(0, 2),
)
def test_copies_that_stay_below_the_least_are_never_verified(
    found: list[list[float]],
    passes: list[float],
    rate: float,
    more: int | None,
    switch_s: float,
    way: dict[str, bool],
    n_others: int,
) -> None:
    choice, base = Rows(**way), len(found) + n_others
    choice.price(base, passes, rate, switch_s)
    last = None if more is None else base + more
    least = choice.least(len(found), last)
    reaches = any(
        got >= enough - 1e-9
        for each in found
        for got, enough in zip(accumulate(each), least, strict=False)
    )
    widths = choice.choose(found, last)
    assert reaches or widths == [1] * len(found)
    if len(found) == 1 and not way:  # nothing is looked at in vain
        exceeds = any(
            got > enough + 1e-9 for got, enough in zip(accumulate(found[0]), least, strict=False)
        )
        assert not exceeds or widths != [1]
