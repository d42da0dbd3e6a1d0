"""What the time of a pass is taken for: its rows, a tree, or new graphs."""

from __future__ import annotations

import pytest

from dflash_local.draft.shape import ShapeName
from dflash_local.pays.costs import Costs
from dflash_local.pays.pass_times import PassTimes

DEPTH = 100
STEPS = {DEPTH: {1: 0.004, 8: 0.008, 16: 0.008, 32: 0.010}}
BUILD_S, RECORD_S = 0.002, 0.004  # what the first two passes with a new graph take on top


def costs(*, switch_s: float = 0.005, tree_s: float = 0.0) -> Costs:
    return Costs(STEPS, {DEPTH: {1: 0.002}}, switch_s=switch_s, tree_s=tree_s)


class Device:
    """Takes as long as told, and longer where graphs are made."""

    def __init__(self, known: Costs, truth: Costs | None = None) -> None:
        self.known = known
        self.times = PassTimes(known)
        self._truth = truth or costs()
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
        self.times.skip(n - 1)
        self.times.observe(n_rows, DEPTH, seconds / n, shape, rebuilt=rebuilt)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("first_s", [0.0005, 0.005, 0.02])
def test_a_new_graph_costs_what_its_first_passes_take_on_top(
    first_s: float, shape: ShapeName
) -> None:
    device = Device(costs(switch_s=first_s))
    for i in range(400):
        device.run((8, 16)[i // 4 % 2], shape=shape)
    assert device.known.switch_s == pytest.approx(BUILD_S + RECORD_S, rel=0.05)
    for n_rows, seconds in STEPS[DEPTH].items():
        assert device.known.step_s(n_rows, DEPTH) == pytest.approx(seconds, rel=1e-6)
    assert device.known.tree_s == 0.0


def test_one_that_the_growing_cache_needs_is_no_slow_pass() -> None:
    device = Device(costs())
    for i in range(2000):
        device.run(16, shape="tree", rebuilt=i % 20 == 0)
    assert device.known.step_s(16, DEPTH) == pytest.approx(STEPS[DEPTH][16], rel=1e-6)
    assert device.known.switch_s == pytest.approx(BUILD_S + RECORD_S, rel=0.05)


def test_a_pass_alone_says_nothing_of_what_the_next_would_have_taken() -> None:
    device = Device(costs())
    for i in range(100):
        device.run(8 if i % 2 else 16)
    assert device.known.switch_s == 0.005


@pytest.mark.parametrize("n", [2, 8])
def test_of_several_passes_told_as_one_the_graphs_are_taken_off(n: int) -> None:
    device = Device(costs())
    for _ in range(200):
        device.run(1, n=n)
        device.run(16)
        device.run(16)
    assert device.known.switch_s == pytest.approx(BUILD_S + RECORD_S, rel=0.05)
    assert device.known.step_s(1, DEPTH) == pytest.approx(STEPS[DEPTH][1], rel=1e-6)


def test_only_rows_of_a_like_pass_have_a_graph() -> None:
    device = Device(costs())
    device.run(16, shape="tree")
    assert device.times.rows("tree") == 16
    assert device.times.rows("chain") is None
    assert device.times.fresh
    device.run(16, shape="tree")
    assert device.times.fresh
    device.run(16, shape="tree")
    assert not device.times.fresh


def test_trees_and_chains_of_as_many_rows_are_told_apart() -> None:
    device = Device(costs(), costs(tree_s=0.001))
    for i in range(6000):
        device.run(16, shape="tree" if i // 10 % 2 else "chain")
    assert device.known.tree_s == pytest.approx(0.001, rel=0.25)
    assert device.known.step_s(16, DEPTH) == pytest.approx(STEPS[DEPTH][16], rel=0.05)


def test_trees_alone_tell_what_their_rows_cost() -> None:
    truth = Costs({DEPTH: {1: 0.004, 24: 0.0094, 32: 0.010}}, {DEPTH: {1: 0.002}})
    device = Device(costs(), truth)
    for _ in range(300):
        device.run(24, shape="tree")
    known = device.known
    assert known.step_s(24, DEPTH) + known.tree_s == pytest.approx(0.0094, rel=0.02)
    assert known.tree_s < 0.0003
