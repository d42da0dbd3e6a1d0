"""The JSON object of the lab's benchmark, and what its report sums up."""

from dataclasses import replace

import pytest

from bench_report import made_report


def test_trees_are_held_against_chains_of_the_same_width() -> None:
    gains = made_report().tree_gains
    assert [(gain.temperature, gain.width) for gain in gains] == [
        (0.0, "auto"),
        (0.0, 4),
        (0.8, "auto"),
        (0.8, 4),
    ]
    tree, chain = (46 + 12) / 18, 46 / 16
    assert all(gain.accepted_length == pytest.approx(tree / chain) for gain in gains)
    assert all(gain.tokens_per_second == 1 for gain in gains)


def test_forced_drafts_are_shown_instead_of_hardly_any() -> None:
    report = made_report()
    variant = report.rows[0].variant
    assert not report.is_forced(0.0, variant)
    own = report.acceptance(0.0, variant).n_rounds
    forced = replace(report.rows[0].acceptance, stats=report.rows[0].acceptance.stats)
    report.rows = [replace(row, forced=forced) for row in report.rows]
    assert report.is_forced(0.0, variant)
    # Those of both states of the caches are the same, and count once.
    assert report.acceptance(0.0, variant).n_rounds == own / 2
