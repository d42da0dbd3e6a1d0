"""The costs of a round: between the measured points, and as live rounds correct them."""

import json
import math
import random

import pytest

from dflash_local.controller.costs import Costs
from dflash_local.draft.shape import ShapeName

STEPS = {100: {1: 0.004, 2: 0.0044, 8: 0.0085, 9: 0.008, 16: 0.0084}, 1100: {1: 0.005, 16: 0.0104}}
DRAFTS = {100: {1: 0.001, 4: 0.0016}}


def costs() -> Costs:
    return Costs(STEPS, DRAFTS, switch_s=0.0005, inject_s=1e-6, token_share=0.1)


def test_measured_points_are_kept() -> None:
    found = costs()
    assert [found.step_s(n, 100) for n in STEPS[100]] == pytest.approx(list(STEPS[100].values()))
    assert found.step_s(16, 1100) == pytest.approx(0.0104)
    assert found.draft_s(4, 100) == pytest.approx(0.0016)
    assert found.draft_s(0, 100) == 0


def test_shorter_drafts_cost_less_and_tell_what_longer_ones_do() -> None:
    found = costs()
    assert found.draft_s(1, 100, 3) == pytest.approx(0.0007)
    assert found.draft_s(4, 100, 5) == pytest.approx(0.0008)
    for _ in range(60):
        found.observe_draft(1, 100, 0.0014, 3)
    assert found.draft_s(1, 100) == pytest.approx(0.002, rel=0.02)


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


@pytest.mark.parametrize("swing", [1.5, 4.0])
@pytest.mark.parametrize("share_drafted", [0.0, 0.01])
def test_a_machine_whose_speed_swings_makes_no_row_count_cheap(
    swing: float, share_drafted: float
) -> None:
    """Single passes for an hour beside other work. Rises that are learnt otherwise than falls added
    up, till sixteen rows seemed to cost what one does, and a division by zero ended an answer."""
    rng = random.Random(1)
    found, slow, depth = costs(), 1.0, 100
    for i in range(16_000):
        depth = rng.randrange(100, 300) if i % 400 == 0 else depth + 1
        slow = swing ** rng.random() if rng.random() < 0.01 else slow
        now = slow * math.exp(abs(rng.gauss(0, 0.15)))
        found.observe_step(1, depth, 0.004 * now)
        if rng.random() < share_drafted:
            found.observe_step(16, depth, 0.0084 * now)
        assert 0.5 / swing < found.step_s(16, depth) / found.step_s(1, depth) / 2.1 < 2


def test_what_a_cached_token_costs_is_fitted_over_all_row_counts() -> None:
    """One that was measured badly at one depth is not thought to be cheap at another."""
    steps = {0: {1: 4.0, 8: 8.4, 9: 8.0, 16: 8.0}, 1000: {1: 4.5, 8: 8.7, 16: 8.7}}
    found = Costs({d: {n: ms / 1e3 for n, ms in row.items()} for d, row in steps.items()}, DRAFTS)
    rises = [found.step_s(n, 4000) - found.step_s(n, 0) for n in (1, 8, 9, 16)]
    assert rises == sorted(rises)
    assert sum((rises[0], rises[1], rises[3])) == pytest.approx(0.006)


def test_a_width_never_measured_gets_a_point_of_its_own() -> None:
    found = costs()
    before = found.step_s(11, 100)
    for _ in range(50):
        found.observe_step(12, 100, 0.0130)
    assert found.step_s(12, 100) == pytest.approx(0.0130, rel=0.03)
    assert found.step_s(11, 100) > before
    assert "12" in found.as_dict()["step_s"]["100"]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("first_s", [0.0005, 0.005, 0.02])
def test_a_new_graph_costs_what_its_first_passes_take_on_top(
    first_s: float, shape: ShapeName
) -> None:
    device = Device(pass_costs(switch_s=first_s))
    for i in range(400):
        device.run((8, 16)[i // 4 % 2], shape=shape)
    assert device.known.switch_s == pytest.approx(BUILD_S + RECORD_S, rel=0.05)
    for n_rows, seconds in PASS_STEPS[DEPTH].items():
        assert device.known.step_s(n_rows, DEPTH) == pytest.approx(seconds, rel=1e-6)


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
    assert again.draft_s(1, 100, 3) == found.draft_s(1, 100, 3) < found.draft_s(1, 100)


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
        {"inject_s": math.inf},
        {"host_s": None},
        {"host_s": 10**400},
        {"step_s": {"100": {"1": 10**400}}},
    ],
)
def test_what_is_no_costs_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Costs.from_dict({**costs().as_dict(), **change})
    for raw in (None, [], {}, 3):
        with pytest.raises(ValueError):
            Costs.from_dict(raw)


# The times of passes: rows, trees, new graphs

DEPTH = 100
PASS_STEPS = {DEPTH: {1: 0.004, 8: 0.008, 16: 0.008, 32: 0.010}}
BUILD_S, RECORD_S = 0.002, 0.004  # what the first two passes with a new graph take on top


def pass_costs(*, switch_s: float = 0.005, tree_s: float = 0.0) -> Costs:
    return Costs(PASS_STEPS, {DEPTH: {1: 0.002}}, switch_s=switch_s, trees={DEPTH: tree_s})


class Device:
    """Takes as long as told, and longer where graphs are made."""

    def __init__(self, known: Costs, truth: Costs | None = None) -> None:
        self.known = known
        self._truth = truth or pass_costs()
        self._kind = (0, False)
        self._made = 0

    def run(
        self, n_rows: int, *, shape: ShapeName = "chain", rebuilt: bool = False, n: int = 1
    ) -> None:
        """`n` passes, told of as one."""
        seconds = 0.0
        if rebuilt or (n_rows, shape) != self._kind:
            self._kind, self._made = (n_rows, shape), 0
        for _ in range(n):
            seconds += self._truth.step_s(n_rows, DEPTH, shape)
            seconds += (BUILD_S, RECORD_S, 0.0)[min(self._made, 2)]
            self._made += 1
        self.known.observe_pass(n_rows, DEPTH, seconds / n, shape, n, rebuilt)


def test_one_that_the_growing_cache_needs_is_no_slow_pass() -> None:
    device = Device(pass_costs())
    for i in range(2000):
        device.run(16, shape="tree", rebuilt=i % 20 == 0)
    assert device.known.step_s(16, DEPTH) == pytest.approx(PASS_STEPS[DEPTH][16], rel=1e-6)


@pytest.mark.parametrize("n", [2, 8])
def test_several_passes_told_as_one_are_no_slow_pass(n: int) -> None:
    device = Device(pass_costs())
    for _ in range(200):
        device.run(1, n=n)
        device.run(16)
        device.run(16)
    assert device.known.step_s(1, DEPTH) == pytest.approx(PASS_STEPS[DEPTH][1], rel=1e-6)


def test_several_passes_told_as_one_count_as_that_many_if_it_was_no_hiccup() -> None:
    """Else a plain step that was measured too fast is put right in a thousand steps, not in some
    sixty, as 16 of them are told of at a time."""
    usual = pass_costs().step_s(1, 0)

    def after(times: list[float]) -> float:
        known = pass_costs()
        for factor in times:
            known.observe_pass(1, 0, factor * usual, "chain", 16, False)
        return known.step_s(1, 0) / usual

    assert after([1, *[3] * 6]) > 2
    assert after([1, 3, 1, 3, 1, 3, 1]) < 1.1


def test_only_rows_of_a_like_pass_have_a_graph() -> None:
    device = Device(pass_costs())
    device.run(16, shape="tree")
    assert device.known.last_rows("tree") == 16
    assert device.known.last_rows("chain") is None


def test_trees_alone_tell_what_their_rows_cost() -> None:
    truth = Costs({DEPTH: {1: 0.004, 24: 0.0094, 32: 0.010}}, {DEPTH: {1: 0.002}})
    device = Device(pass_costs(), truth)
    for _ in range(300):
        device.run(24, shape="tree")
    known = device.known
    assert known.step_s(24, DEPTH, "tree") == pytest.approx(0.0094, rel=0.02)


def test_trees_cost_more_the_more_is_cached() -> None:
    steps = {100: {1: 0.004, 16: 0.008}, 8100: {1: 0.005, 16: 0.009}}
    known = Costs(steps, {100: {1: 0.002}}, trees={100: 0.0002, 8100: 0.0010})
    for depth, extra in ((100, 0.0002), (4100, 0.0006), (8100, 0.0010)):
        chain_s = known.step_s(16, depth)
        assert known.step_s(16, depth, "tree") == pytest.approx(chain_s + extra)
    assert Costs.from_dict(known.as_dict()).as_dict() == known.as_dict()


def test_a_tree_measured_far_too_dear_does_not_make_its_rows_cheap() -> None:
    """One calibration in a handful is that wrong."""
    costs = Costs({0: {1: 1.0, 16: 1.5, 32: 1.9}}, {0: {1: 0.5}}, trees={0: 2.2})
    for _ in range(50):
        costs.observe_step(16, 0, 1.6, "tree")
    assert costs.step_s(16, 0, "tree") == pytest.approx(1.6, rel=0.05)
    assert costs.step_s(16, 0) == pytest.approx(1.5, rel=0.1)
    assert costs.step_s(32, 0) == pytest.approx(1.9, rel=0.1)
