"""`dflash-local calibrate`: measures what is already known, and keeps it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import tiny_coder
from command_line import refused, run_here
from dflash_local import load, records
from dflash_local.cli.calibrate import cost_lines
from dflash_local.controller.costs import Costs

TARGET, DRAFTER = map(str, tiny_coder.pair())
ON_CPU = ("--gpu-layers", "0", "--ctx", "512")


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    variables = {"DFLASH_LOCAL_CACHE": str(cache), "DFLASH_LOCAL_CALIBRATION_S": "0.2"}
    return run_here("calibrate", *arguments, environment=variables)


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "costs").glob("*"))


Measured = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A cache folder, and the command that was the first to use it."""
    cache = tmp_path_factory.mktemp("measured")
    return cache, run(*ON_CPU, cache=cache)


@pytest.fixture
def known(measured: Measured, tmp_path: Path) -> Path:
    """A copy of that folder, to be changed."""
    return shutil.copytree(measured[0], tmp_path / "cache")


@pytest.mark.slow
def test_costs_are_told_and_kept(measured: Measured) -> None:
    cache, done = measured
    assert done.returncode == 0, done.stderr
    assert "measuring what drafting costs on this machine: a few seconds" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("target step after 4 tokens, ms by rows: 1: ")
    assert any(line.startswith("draft stage, ms by sequences: 1: ") for line in lines)
    (file,) = kept(cache)
    assert cost_lines(Costs.from_dict(json.loads(file.read_text()))) == lines


def test_what_is_kept_is_measured_again_and_replaced(known: Path) -> None:
    (file,) = kept(known)
    absurd = Costs({4: {1: 3600.0}}, {4: {1: 3600.0}})
    file.write_text(json.dumps(absurd.as_dict()))
    done = run(*ON_CPU, "-q", "--json", cache=known)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert kept(known) == [file]
    now = json.loads(file.read_text())
    assert told["step_ms"]["4"]["1"] == pytest.approx(1e3 * now["step_s"]["4"]["1"], abs=1e-4)
    assert 0 < told["step_ms"]["4"]["1"] < 3.6e6
    assert set(told["draft_ms"]["4"]) == {"1"}
    assert {"switch_ms", "host_ms", "draft_host_ms", "inject_ms"} < set(told)


def test_a_model_begins_with_what_was_kept(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = kept(known)
    raw = json.loads(file.read_text())
    raw["step_s"] = {"4": {"1": 12.0, "2": 13.0}}
    file.write_text(json.dumps(raw))
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(known))
    with load(TARGET, DRAFTER, n_ctx=512, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        assert model.engine.controller is not None
        assert model.engine.controller.costs.step_s(1, 4) == 12.0
        assert model.drafter is not None
        again = records.costs(
            model.target, model.drafter, before=model.engine.slots.forget_all, again=True
        )
        assert 0 < again.step_s(1, 4) < 12.0
        assert json.loads(file.read_text()) == again.as_dict()


def test_a_time_that_is_none_is_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_LOCAL_CALIBRATION_S", "soon")
    assert refused("calibrate", "-q", *ON_CPU) == (
        "dflash-local: error: DFLASH_LOCAL_CALIBRATION_S is 'soon'; expected seconds above 0, "
        "such as 3\n"
    )
