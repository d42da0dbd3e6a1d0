"""The costs of the tiny pair on this machine: measured once, within bounds, and kept."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tiny_coder
from dflash_local import load, records
from dflash_local.controller import calibration
from dflash_local.controller.calibration import BUDGET_S, BUDGET_STEPS, ENVIRONMENT, budget_s
from dflash_local.controller.controller import Controller
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest, WrappedDrafter
from dflash_local.errors import InputError
from dflash_local.fit.architectures import WayBack
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from hybrid import write_hybrid
from pair_engine import fused_drafter, open_target

DRAFT = Draft.chain([0] * 15, [-0.1] * 15)


def clock(monkeypatch: pytest.MonkeyPatch, ticks: Iterator[float]) -> None:
    """The time goes on by the next of `ticks`, in seconds, whenever a calibration looks at it."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += next(ticks)
        return now

    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=look))


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole budget, on a machine where all passes take as long, whatever else this one does."""
    monkeypatch.delenv(ENVIRONMENT)
    clock(monkeypatch, (1e-2 for _ in count()))


def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work comes up: every pass takes longer than the one before."""
    clock(monkeypatch, (5e-3 * 1.02**n for n in count()))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every pass that a target makes."""
    rows: list[int] = []
    run = Target.run

    def counted(self: Target, batch: Batch) -> None:
        rows.append(len(batch))
        run(self, batch)

    monkeypatch.setattr(Target, "run", counted)
    return rows


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that leaves out most points."""
    monkeypatch.setenv(ENVIRONMENT, "0.1")


def nothing() -> None:
    pass


def test_measured_once_and_kept(own_cache: Path, passes: list[int]) -> None:
    calls: list[None] = []
    with open_target(n_batch=16) as target:
        drafter = fused_drafter(target)
        costs = records.costs(target, drafter, before=lambda: calls.append(None))
        assert 0 < len(passes) <= BUDGET_STEPS + 1
        assert all(costs.step_s(rows, 0) > 0 for rows in range(1, 17))
        assert costs.draft_s(1, 0) > 0
        n = len(passes)
        again = records.costs(target, drafter, before=lambda: calls.append(None))
        assert again.as_dict() == costs.as_dict()
        assert len(calls) == 1 and len(passes) == n
        # What live rounds have taught is there for the next process.
        for _ in range(20):
            again.observe_step(5, 100, 1.0)
        records.keep(target, drafter, again)
        assert records.costs(target, drafter, before=nothing).as_dict() == again.as_dict()
    (kept,) = (own_cache / "costs").iterdir()
    assert json.loads(kept.read_text())["step_s"]


class TokenByToken(WrappedDrafter):
    """Takes as long for each token as a calibration's look at the clock."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for _ in range(max(request.n_draft for request in requests)):
            calibration.time.perf_counter()
        return self.inner.draft(requests)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("by_steps", [True, False])
def test_what_each_token_of_a_draft_costs_is_measured_where_it_costs(by_steps: bool) -> None:
    with open_target() as target:
        drafter = TokenByToken(fused_drafter(target))
        drafter.by_steps = by_steps
        costs = records.costs(target, drafter, before=nothing)
        n_draft = drafter.block_size - 1
        for n in range(1, n_draft + 1):
            expected = n if by_steps else n_draft
            found = costs.draft_s(1, costs.depths[0], n_draft - n)
            assert found == pytest.approx(1e-2 * (expected + 1))


@pytest.mark.usefixtures("own_cache")
def test_a_rough_idea_is_measured_anew_where_there_is_more_time(
    passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the drafts stays."""
    monkeypatch.setenv(ENVIRONMENT, "0.1")
    with open_target() as target:
        drafter = fused_drafter(target)
        rough = records.costs(target, drafter, before=nothing)
        known = records.known_drafts(target, drafter, 0)
        known[0].observe(DRAFT, [0] * 16)
        records.keep(target, drafter, rough, known)
        n = len(passes)
        records.costs(target, drafter, before=nothing)
        assert len(passes) == n
        for budget, is_measured in (("0.2", True), ("0.1", False), ("0.2", False)):
            n = len(passes)
            monkeypatch.setenv(ENVIRONMENT, budget)
            records.costs(target, drafter, before=nothing)
            assert (len(passes) > n) == is_measured
        assert records.known_drafts(target, drafter, 0)[0].n_verified == 1


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("n_ctx", [256, 1200])
def test_what_many_cached_tokens_cost_is_measured_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, n_ctx: int
) -> None:
    """Of chains and of trees."""
    monkeypatch.setenv(ENVIRONMENT, "600")
    monkeypatch.setattr(calibration, "BUDGET_STEPS", 160)
    monkeypatch.setattr(calibration, "DEEP", (100, 500))
    with open_target(n_ctx=n_ctx, n_batch=32, n_branches=32) as target:
        deepest = min(500, target.n_ctx - 64)
        costs = records.costs(target, fused_drafter(target), before=nothing)
    assert costs.depths[-1] == deepest
    assert list(costs.as_dict()["tree_s"]) == ["4", str(deepest)]


@pytest.mark.usefixtures("own_cache")
def test_a_few_tokens_more_tell_nothing_of_what_each_costs() -> None:
    with open_target(n_ctx=100, n_batch=16) as target:
        assert records.costs(target, fused_drafter(target), before=nothing).depths == [4]


def test_what_a_busy_machine_tells_is_retried_and_not_relied_on(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    with open_target(n_ctx=256, n_branches=16) as target:
        drafter = fused_drafter(target)
        busy(monkeypatch)
        for n in (1, 2):
            costs = records.costs(target, drafter, before=lambda: calls.append(None))
            assert "busy" in (costs.noise or "")
            assert len(calls) == n  # the costs of the first time were not taken for known
        # What drafts were worth was learnt from drafts, and stays.
        known = records.known_drafts(target, drafter, 15)
        known[0].observe(DRAFT, [0] * 16)
        records.keep(target, drafter, costs, known)
        assert records.known_drafts(target, drafter, 15)[0].as_dict() == known[0].as_dict()


@pytest.mark.slow
def test_a_disturbance_that_ends_is_outweighed(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_target(n_ctx=256) as target:
        drafter = fused_drafter(target)
        clock(monkeypatch, (25e-3 if n < 40 else 5e-3 for n in count()))
        assert records.costs(target, drafter, before=nothing).noise is None
        assert records.costs(target, drafter, before=pytest.fail).noise is None


def test_a_rough_idea_is_not_judged(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "0.5")
    busy(monkeypatch)
    with open_target(n_ctx=256) as target:
        assert records.costs(target, fused_drafter(target), before=nothing).noise is None


@pytest.mark.usefixtures("own_cache")
def test_a_load_on_a_busy_machine_says_so(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    busy(monkeypatch)
    load(*pair, n_ctx=256, n_threads=1, say=said.append).close()
    assert sum("busy with other work" in line for line in said) == 1


def test_a_cache_that_cannot_be_written_is_told(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each load would say that it measures once."""
    file = tmp_path / "no-folder"
    file.touch()
    monkeypatch.setenv(ENVIRONMENT, "0.05")
    for cache, n in ((file, 1), (tmp_path / "folder", 0)):
        monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(cache))
        said: list[str] = []
        load(*pair, n_ctx=256, n_threads=1, say=said.append).close()
        told = [line for line in said if "DFLASH_LOCAL_CACHE" in line]
        assert len(told) == n and all(str(file) in line for line in told)


def test_a_slow_machine_takes_few_points(
    own_cache: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the time is over at once, a plain step and one of two rows are still known."""
    monkeypatch.setenv(ENVIRONMENT, "1e-9")
    with open_target(n_ctx=256) as target:
        costs = records.costs(target, fused_drafter(target), before=nothing)
    assert list(costs.as_dict()["step_s"]["4"]) == ["1", "2"]
    assert len(passes) == 6
    assert costs.step_s(16, 0) >= costs.step_s(2, 0)
    assert costs.draft_s(1, 0) > 0
    Controller(costs, 16).open()


@pytest.mark.parametrize("given", ["soon", "3 s", "0", "-1", "nan", "inf"])
def test_seconds_that_are_none_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, given)
    with pytest.raises(InputError, match=rf"{ENVIRONMENT} is '{given}'; expected seconds above 0"):
        budget_s()


@pytest.mark.parametrize(("given", "seconds"), [("", BUDGET_S), ("0.5", 0.5), (" 60 ", 60.0)])
def test_seconds_are_those_of_the_variable(
    given: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, given)
    assert budget_s() == seconds


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "options",
    [
        *({"n_ctx": n_ctx} for n_ctx in (24, 40, 100)),
        *({"n_batch": n_batch} for n_batch in (1, 3)),
        *({"n_batch": n_rows, "n_branches": n_rows} for n_rows in (9, 12, 16, 32)),
        {"n_ctx": 512, "n_seq": 3},
        {"n_ctx": 16, "n_seq": 32},
        {"n_seq": 4, "n_branches": 16},
    ],
    ids=str,
)
def test_any_context_is_measured_and_left_empty(
    options: dict[str, int], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small it is, and however many share it."""
    if "n_batch" in options or "n_ctx" in options:
        monkeypatch.setenv(ENVIRONMENT, "0.5")
    n_seq, n_branches = options.get("n_seq", 1), options.get("n_branches", 1)
    with open_target(**{"n_ctx": 256} | options) as target:
        drafter = fused_drafter(target)
        costs = records.costs(target, drafter, before=nothing)
        assert costs.step_s(n_seq, 0) > 0 and costs.draft_s(n_seq, 0) > 0
        assert costs.step_s(n_branches, 0, "tree") > 0
        assert max(passes) <= options.get("n_batch", 512) and len(passes) <= BUDGET_STEPS + 1
        assert drafter.length(0) == 0
        target.decode([5], [0], [0], [True])
        assert np.isfinite(target.logits(0)).all()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("back", [WayBack("snapshots", 7), WayBack("replay", 7)], ids=str)
def test_passes_over_a_recurrent_state_begin_with_the_same(
    back: WayBack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be cut back after passes of one row, and after wider ones only so far."""
    states: list[list[bytes]] = []  # before the passes, by what the cache was filled with
    run = Target.run

    def seen(self: Target, batch: Batch) -> None:
        if begin := batch.positions[0]:
            states[-1].append(self.checkpoint(0, begin).state.tobytes())
        else:
            states.append([])
        run(self, batch)

    monkeypatch.setattr(Target, "run", seen)
    path = write_hybrid(tmp_path / "target.gguf", "qwen35", tiny_coder.pair()[0])
    options = TargetOptions(n_ctx=128, n_threads=1, n_batch=128, way_back=back)
    with Target(path, options) as target:
        records.costs(target, None, before=nothing)
        assert target.max_width > 1
    assert sum(map(len, states)) > 20
    assert all(len(set(filled)) <= 1 for filled in states)
