"""What is trained and where: all weights where they fit, low-rank additions elsewhere, by turns
with the target where these do not fit beside it."""

from __future__ import annotations

import pytest
import torch

from dflash_local import demo
from dflash_local.gguf.file import GgufFile
from dflash_local.tune.plan import TunePlan
from dflash_local.tune.training import Trainer
from dflash_local.tune.weights import read_torch_drafter


@pytest.fixture(scope="module")
def drafter() -> GgufFile:
    return GgufFile.open(demo.pair()[1])


def test_the_plan_takes_what_fits(drafter: GgufFile) -> None:
    whole = TunePlan.of(drafter, {}, None)
    assert (whole.low_rank, whole.by_turns) == (False, False)
    assert TunePlan.of(drafter, {}, whole.bytes) == whole
    low = TunePlan.of(drafter, {}, whole.bytes - 1)
    assert (low.low_rank, low.by_turns) == (True, False)
    assert low.bytes < whole.bytes
    assert not any("by turns" in line for line in low.lines(low.bytes))
    turns = TunePlan.of(drafter, {}, low.bytes - 1)
    assert (turns.low_rank, turns.by_turns) == (True, True)
    assert any("by turns" in line for line in turns.lines(low.bytes - 1))


def test_the_plan_tells_the_memory_it_takes(drafter: GgufFile) -> None:
    needed = f"{TunePlan.of(drafter, {}, None).bytes / (1 << 30):.1f} GiB"
    for free in (24 << 30, 1):
        lines = TunePlan.of(drafter, {}, free).lines(free)
        assert any("GiB" in line and "beside the target" in line for line in lines), lines
    assert any(needed in line for line in TunePlan.of(drafter, {}, 24 << 30).lines(24 << 30))


def test_a_run_goes_on_with_what_it_trained_whatever_memory_is_free(drafter: GgufFile) -> None:
    whole = TunePlan.of(drafter, {}, None)
    for before in (True, False):
        for free in (None, 1, whole.bytes):
            found = TunePlan.of(drafter, {"low_rank": before}, free)
            assert found.low_rank == before
            assert found.by_turns == (free == 1)


@pytest.mark.parametrize("free", [None, 1])
def test_the_plan_counts_what_is_trained(drafter: GgufFile, free: int | None) -> None:
    plan = TunePlan.of(drafter, {}, free)
    target, draft = demo.pair()
    trainer = Trainer(
        read_torch_drafter(draft, target, dtype=torch.float32), low_rank=plan.low_rank
    )
    assert plan.n_trained == trainer.n_trained
