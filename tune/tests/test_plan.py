"""The plan of a training: all weights where they fit, low-rank additions elsewhere, by turns with
the target where these do not fit beside it."""

import pytest

import tiny_coder
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local_tune.plan import TunePlan, answer_bytes

EACH = 397_934_592
"""Bytes of an answer of 2048 tokens, of the tiny pair."""


@pytest.fixture(scope="module")
def drafter() -> GgufFile:
    return GgufFile.open(tiny_coder.pair()[1])


def test_the_plan_takes_what_fits(drafter: GgufFile) -> None:
    whole = TunePlan.of(drafter, {}, None, EACH)
    assert (whole.low_rank, whole.by_turns) == (False, False)
    beside = TunePlan.of(drafter, {}, whole.bytes, EACH)
    assert (beside.low_rank, beside.by_turns) == (False, False)
    low = TunePlan.of(drafter, {}, whole.bytes - 1, EACH)
    assert (low.low_rank, low.by_turns) == (True, False)
    assert low.bytes < whole.bytes
    assert not any("by turns" in line for line in low.lines(low.bytes))
    turns = TunePlan.of(drafter, {}, low.bytes - 1, EACH)
    assert (turns.low_rank, turns.by_turns) == (True, True)
    assert any("by turns" in line for line in turns.lines(low.bytes - 1))


def test_a_drafter_from_nothing_has_one_moment_less_and_no_additions(drafter: GgufFile) -> None:
    plan = TunePlan.of(drafter, {}, None, EACH, from_nothing=True)
    whole = TunePlan.of(drafter, {}, None, EACH)
    assert plan.n_trained == whole.n_trained
    assert 0.9 * plan.n_trained < plan.n_by_muon < plan.n_trained  # the norms are Adam's
    assert whole.bytes - plan.bytes == 4 * plan.n_by_muon
    assert whole.disk_bytes - plan.disk_bytes == 8 * plan.n_by_muon
    assert f"{plan.n_by_muon / 1e6:.0f} million of them with Muon" in plan.lines(None)[0]
    for state in ({}, {"low_rank": False}):
        turns = TunePlan.of(drafter, state, plan.bytes - 1, EACH, from_nothing=True)
        assert (turns.low_rank, turns.by_turns) == (False, True)
        assert not TunePlan.of(drafter, state, plan.bytes, EACH, from_nothing=True).by_turns


def test_the_plan_tells_the_memory_it_takes(drafter: GgufFile) -> None:
    plan = TunePlan.of(drafter, {}, 24 << 30, EACH)
    assert plan.n_packed == 16
    needed = f"{plan.bytes / (1 << 30):.1f} GiB"
    for free in (24 << 30, 1):
        lines = TunePlan.of(drafter, {}, free, EACH).lines(free)
        assert any("GiB" in line and "beside the target" in line for line in lines), lines
    assert any(needed in line for line in plan.lines(24 << 30))


def test_answers_that_wait_on_the_disk_are_counted(drafter: GgufFile) -> None:
    for free, waiting in ((24 << 30, 5000), (1, 0), (None, 0)):  # beside the target, by turns, CPU
        without = TunePlan.of(drafter, {}, free, EACH, from_nothing=True)
        plan = TunePlan.of(drafter, {}, free, EACH, from_nothing=True, waiting_bytes=5000)
        assert plan.disk_bytes - without.disk_bytes == waiting


def test_as_many_answers_are_packed_as_half_of_what_is_left_holds(drafter: GgufFile) -> None:
    whole = TunePlan.of(drafter, {}, None, EACH)
    assert whole.n_packed == 1
    for spare in (0, 1 << 30, 4 << 30, 64 << 30):
        plan = TunePlan.of(drafter, {}, whole.bytes + spare, EACH)
        assert plan.bytes <= whole.bytes + spare // 2
        assert plan.n_packed == min(16, ((2 << 30) + spare // 2) // EACH)
    assert TunePlan.of(drafter, {}, whole.bytes, 9 << 30).n_packed == 1
    spec = read_drafter(drafter, n_vocab=8192)
    assert answer_bytes(spec, 512) < answer_bytes(spec, 2048) == EACH


def test_a_run_goes_on_with_what_it_trained_whatever_memory_is_free(drafter: GgufFile) -> None:
    whole = TunePlan.of(drafter, {}, None, EACH)
    for before in (True, False):
        for free in (None, 1, whole.bytes):
            found = TunePlan.of(drafter, {"low_rank": before}, free, EACH)
            assert found.low_rank == before
            assert found.by_turns == (free == 1)
