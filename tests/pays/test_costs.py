"""What a round costs: between the measured points, and as live rounds correct them."""

from __future__ import annotations

import json
import math

import pytest

from dflash_local.pays.costs import Costs

STEPS = {
    100: {1: 0.004, 2: 0.0044, 8: 0.0085, 9: 0.008, 16: 0.0084},
    1100: {1: 0.005, 16: 0.0104},
}
DRAFTS = {100: {1: 0.001, 4: 0.0016}}


def costs() -> Costs:
    return Costs(STEPS, DRAFTS, switch_s=0.0005, inject_s=1e-6)


def test_measured_points_are_kept() -> None:
    found = costs()
    assert [found.step_s(n, 100) for n in STEPS[100]] == pytest.approx(list(STEPS[100].values()))
    assert found.step_s(16, 1100) == pytest.approx(0.0104)
    assert found.draft_s(4, 100) == pytest.approx(0.0016)
    assert found.draft_s(0, 100) == 0


def test_lines_between_them_keep_the_cliff() -> None:
    found = costs()
    assert found.step_s(5, 100) == pytest.approx((0.0044 + 0.0085) / 2)
    assert found.step_s(9, 100) < found.step_s(8, 100)
    # Beyond, as steep as the upper half; 32 rows are not dearer than two passes of 16.
    assert 0.0084 <= found.step_s(32, 100) < 0.0168


def test_depth_adds_what_it_adds_to_the_nearest_widths() -> None:
    found = costs()
    assert found.step_s(1, 600) == pytest.approx(0.0045)
    assert found.step_s(2, 1100) - found.step_s(2, 100) == pytest.approx(
        0.001 + (0.002 - 0.001) / 15
    )
    assert found.step_s(1, 0) == pytest.approx(0.0039)


def test_live_rounds_correct_a_width_but_not_by_one_hiccup() -> None:
    found = costs()
    found.observe_step(16, 100, 0.2)
    assert found.step_s(16, 100) < 0.0084 * 1.12
    for _ in range(200):
        found.observe_step(16, 100, 0.0100)
    assert found.step_s(16, 100) == pytest.approx(0.0100, rel=0.02)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        found.observe_step(16, 100, seconds)
    assert found.step_s(16, 100) == pytest.approx(0.0100, rel=0.02)


def test_a_calibration_that_was_far_off_is_soon_put_right() -> None:
    found = Costs({100: {1: 0.04, 2: 0.0044}}, DRAFTS)
    for _ in range(40):
        found.observe_step(1, 100, 0.004)
    assert found.step_s(1, 100) == pytest.approx(0.004, rel=0.2)


def test_a_width_never_measured_gets_a_point_of_its_own() -> None:
    found = costs()
    before = found.step_s(11, 100)
    for _ in range(50):
        found.observe_step(12, 100, 0.0130)
    assert found.step_s(12, 100) == pytest.approx(0.0130, rel=0.03)
    assert found.step_s(11, 100) > before
    assert 12 in found.curve()


def test_the_whole_machine_may_slow_down() -> None:
    found = costs()
    for _ in range(300):
        found.observe_step(16, 100, 0.0084 * 1.4)
    assert found.step_s(8, 100) > 0.0085 * 1.03


def test_a_change_of_width_is_told_apart() -> None:
    found = costs()
    step = found.step_s(8, 100)
    for _ in range(200):
        found.observe_switch(0.001, step)
    assert found.step_s(8, 100) == step
    assert found.switch_s == pytest.approx(0.001, rel=0.05)


def test_the_host_is_learnt_with_and_without_drafts() -> None:
    found = costs()
    for _ in range(300):
        found.observe_host(False, 0.0002)
        found.observe_host(True, 0.0005)
    assert found.host_s == pytest.approx(0.0002, rel=0.05)
    assert found.draft_host_s == pytest.approx(0.0003, rel=0.05)


def test_kept_and_read_again() -> None:
    found = costs()
    found.observe_step(12, 100, 0.01)
    again = Costs.from_dict(json.loads(json.dumps(found.as_dict())))
    for rows in (1, 2, 5, 12, 16, 40):
        for depth in (100, 700, 1100):
            assert again.step_s(rows, depth) == pytest.approx(found.step_s(rows, depth), rel=1e-6)
    assert (again.switch_s, again.inject_s) == (found.switch_s, found.inject_s)


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": {}},
        {"step_s": {"100": {}}},
        {"step_s": {"100": {"0": 1.0}}},
        {"step_s": {"100": {"1": -1.0}}},
        {"step_s": {"100": {"1": "fast"}}},
        {"step_s": [1.0]},
        {"draft_s": None},
        {"switch_s": math.nan},
        {"host_s": None},
    ],
)
def test_what_is_no_costs_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Costs.from_dict({**costs().as_dict(), **change})
    for raw in (None, [], {}, 3):
        with pytest.raises(ValueError):
            Costs.from_dict(raw)


def test_in_words() -> None:
    assert costs().lines() == [
        "target step after 100 tokens, ms by rows: 1: 4, 2: 4.4, 8: 8.5, 9: 8, 16: 8.4",
        "target step after 1100 tokens, ms by rows: 1: 5, 2: 5.47, 8: 9.97, 9: 9.53, 16: 10.4",
        "draft stage, ms by sequences: 1: 1, 4: 1.6",
        "another row count than the last: 0.5 ms; injecting a row: 0.001 ms",
    ]
