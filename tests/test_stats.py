"""The numbers of a request add up."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_local.stats import Stats


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)).map(sorted), max_size=30))
def test_rounds_add_up(rounds: list[list[int]]) -> None:
    stats = Stats()
    for accepted, drafted in rounds:
        stats.record_round(drafted=drafted, emitted=accepted + 1)
    assert stats.rounds == sum(stats.accepted_lengths.values()) == len(rounds)
    assert stats.emitted == stats.accepted + stats.rounds
    assert stats.accepted <= stats.drafted
    if rounds:
        assert stats.tokens_per_round == pytest.approx(stats.emitted / stats.rounds)


def test_a_token_of_the_prompt_s_last_row_is_no_part_of_the_mean() -> None:
    stats = Stats(decode_s=2.0)
    stats.emitted += 1
    stats.record_round(drafted=7, emitted=4)
    stats.record_round(drafted=7, emitted=2)
    assert stats.emitted == 7
    assert stats.tokens_per_round == 3.0
    assert stats.tokens_per_second == 3.0


def test_shares_of_the_time_add_up() -> None:
    stats = Stats(decode_s=2.0, draft_s=0.5, verify_s=1.0, sample_s=0.1)
    assert stats.rest_s == pytest.approx(0.4)
    assert stats.shares == pytest.approx(
        {"draft": 0.25, "verify": 0.5, "sample": 0.05, "rest": 0.2}
    )
    # Clocks are read one after the other: the parts may exceed the whole by a little.
    assert sum(Stats(decode_s=1.0, verify_s=1.001).shares.values()) == pytest.approx(1)


def test_nothing_decoded_divides_by_nothing() -> None:
    stats = Stats()
    assert (stats.tokens_per_round, stats.tokens_per_second, stats.rest_s) == (0, 0, 0)
    assert set(stats.shares.values()) == {0}


def test_as_dict_is_json() -> None:
    stats = Stats(prompt_tokens=12, cached_tokens=4, prompt_s=0.123456789, decode_s=1 / 3)
    stats.record_round(drafted=15, emitted=11)
    stats.record_round(drafted=15, emitted=3)
    report = stats.as_dict()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert list(report["accepted_lengths"].items()) == [("3", 1), ("11", 1)]
    assert report["tokens_per_round"] == 7.0
    assert report["prompt_s"] == 0.123457
    assert set(report["shares"]) == {"draft", "verify", "sample", "rest"}


def test_trees_are_counted_by_nodes_and_by_depth() -> None:
    stats = Stats()
    stats.record_round(drafted=15, emitted=4, depth=6)
    stats.record_tree(leaves=7, on_side=True)
    stats.record_round(drafted=3, emitted=2)
    assert stats.widths == {4: 1, 16: 1}
    assert stats.position_drafted == [2, 2, 2, 1, 1, 1]
    assert stats.position_accepted == [2, 1, 1, 0, 0, 0]
    total = Stats.sum([stats, stats])
    assert (total.tree_rounds, total.leaves, total.side_rounds) == (2, 14, 2)
    assert total.position_drafted == [4, 4, 4, 2, 2, 2]
