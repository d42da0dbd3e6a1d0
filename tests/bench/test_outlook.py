"""From what a machine's rounds cost to the widths that would pay there."""

import pytest

from dflash_local.bench.outlook import Outlook, outlook_line, outlooks
from dflash_local.controller.costs import Costs

FLAT = Costs({0: {1: 0.004, 8: 0.004, 16: 0.004}}, {0: {1: 0.001}})
BY_THE_ROW = Costs({0: {1: 0.004, 16: 0.064}}, {0: {1: 0.001}})


def test_where_rows_cost_nothing_the_whole_block_pays() -> None:
    found = outlooks(FLAT, 16)
    assert [each.width for each in found] == [16, 16, 16]
    # Tokens of a whole block, in the time of a step and a draft.
    assert [each.gain for each in found] == pytest.approx([n * 4 / 5 for n in (3, 4.5, 6.5)])


def test_where_each_row_costs_a_step_nothing_pays() -> None:
    found = outlooks(BY_THE_ROW, 16)
    assert all(each.gain < 1 for each in found)
    assert outlook_line(found).startswith(
        "at 3, 4.5, 6.5 tokens per round drafting does not pay: at most 0."
    )


def test_a_cliff_is_not_climbed() -> None:
    cliff = Costs({0: {1: 0.004, 8: 0.004, 9: 0.02, 16: 0.02}}, {0: {1: 0.001}})
    assert {each.width for each in outlooks(cliff, 16)} == {8}


def test_a_small_block_has_small_lengths() -> None:
    assert [each.accepted_length for each in outlooks(FLAT, 4)] == [3.0]
    assert [each.accepted_length for each in outlooks(FLAT, 2)] == [2.0]


def test_one_line_tells_both() -> None:
    line = outlook_line([Outlook(3.0, 4, 0.934), Outlook(4.5, 8, 1.5), Outlook(6.5, 12, 2.251)])
    assert line == (
        "at 4.5, 6.5 tokens per round drafting pays with width 8, 12: "
        "1.50, 2.25 times plain decoding; "
        "at 3 tokens per round drafting does not pay: at most 0.93 times plain decoding"
    )
