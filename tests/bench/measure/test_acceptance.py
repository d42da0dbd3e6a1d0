"""The outcome of drafts adds up over answers."""

import pytest

from dflash_local.bench.measure.acceptance import Acceptance
from dflash_local.stats import Stats


def test_it_adds_up_and_leaves_plain_rounds_out() -> None:
    stats = Stats()
    for drafted, emitted in ((3, 1), (3, 3), (2, 3), (0, 1), (0, 1)):
        stats.record_round(drafted=drafted, emitted=emitted)
    total = Acceptance.of([stats, stats])
    assert total.lengths == {1: 2, 3: 4}
    assert total.mean_length == pytest.approx(14 / 6)
    assert total.plain_rounds == 4
    assert total.stats.widths == {1: 4, 3: 2, 4: 4}
    assert total.by_position == pytest.approx([2 / 3, 2 / 3, 0.0])
    assert total.mean_rows == pytest.approx((4 * 1 + 2 * 3 + 4 * 4) / 10)
    assert (total.nodes, total.depth) == (pytest.approx(16 / 6), pytest.approx(16 / 6))
    assert (total.branches, total.side_share) == (1, 0)


def test_trees_have_branches() -> None:
    stats = Stats()
    stats.record_round(drafted=7, emitted=3, depth=4)
    stats.record_tree(leaves=3, on_side=True)
    stats.record_round(drafted=3, emitted=1)
    found = Acceptance.of([stats])
    assert (found.nodes, found.depth, found.branches, found.side_share) == (5, 3.5, 2, 0.5)


def test_without_drafts_there_are_no_averages() -> None:
    stats = Stats()
    stats.record_round(drafted=0, emitted=1)
    for nothing in (Acceptance(), Acceptance.of([stats])):
        assert nothing.mean_length is nothing.nodes is nothing.depth is nothing.branches is None
        assert nothing.side_share is None and nothing.n_rounds == 0
    assert Acceptance().mean_rows is None and Acceptance.of([stats]).mean_rows == 1
