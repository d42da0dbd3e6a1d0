"""The records of a pair on this machine: kept by files and settings, and read as they were."""

import json
import shutil
from pathlib import Path

import pytest

import tiny_coder
from dflash_local import load, records
from dflash_local.controller.calibration import ENVIRONMENT
from dflash_local.draft.draft import Draft
from pair_engine import fused_drafter, open_target

DRAFT = Draft.chain([0] * 15, [-0.1] * 15)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rough idea, which is not judged, and so kept."""
    monkeypatch.setenv(ENVIRONMENT, "0.1")


def nothing() -> None:
    pass


@pytest.mark.slow
def test_what_drafts_and_trees_were_worth_is_known_to_the_next_process() -> None:
    with open_target(n_ctx=256, n_branches=16) as target:
        drafter = fused_drafter(target)
        costs = records.costs(target, drafter, before=nothing)
        cold = records.known_drafts(target, drafter, 15)
        assert [known.n_verified for known in cold] == [0, 0]
        cold[0].observe(DRAFT, [0] * 16)
        cold[0].notice([0.5] * 15, "tree")
        records.keep(target, drafter, costs, cold)
        greedy, sampled = records.known_drafts(target, drafter, 15)
        assert greedy.as_dict() == cold[0].as_dict() and greedy.n_verified == 1
        assert sampled.as_dict() == cold[1].as_dict() and sampled.n_verified == 0


def test_costs_are_kept_under_the_file_that_was_loaded(own_cache: Path, tmp_path: Path) -> None:
    """Not under what lies at its path when the model is closed."""
    path = tmp_path / "target.gguf"
    shutil.copy(tiny_coder.pair()[0], path)
    with load(path, n_ctx=128, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        model.generate("def f(x):", max_tokens=4)
        (kept,) = (own_cache / "costs").iterdir()
        kept.unlink()
        path.unlink()
        shutil.copy(tiny_coder.pair()[1], path)
    assert list((own_cache / "costs").iterdir()) == [kept]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"step_s": {}}', '{"step_s": {"4": {"1": 0}}}'])
def test_a_damaged_file_is_measured_anew(own_cache: Path, damage: str) -> None:
    with open_target(n_ctx=256) as target:
        drafter = fused_drafter(target)
        records.costs(target, drafter, before=nothing)
        (kept,) = (own_cache / "costs").iterdir()
        kept.write_text(damage)
        calls: list[None] = []
        costs = records.costs(target, drafter, before=lambda: calls.append(None))
        assert len(calls) == 1
        assert json.loads(kept.read_text()) == costs.as_dict()


@pytest.mark.usefixtures("own_cache")
def test_another_context_is_not_measured_again() -> None:
    calls: list[int] = []
    for n_ctx in (256, 2048, 1100, 4000):
        with open_target(n_ctx=n_ctx) as target:
            records.costs(target, None, before=lambda n=n_ctx: calls.append(n))
    assert calls == [256]


def test_other_settings_are_measured_apart(own_cache: Path) -> None:
    for kv_type in ("q8_0", "f16"):
        with open_target(n_ctx=256, kv_type=kv_type) as target:
            records.costs(target, fused_drafter(target), before=nothing)
    assert len(list((own_cache / "costs").iterdir())) == 2
