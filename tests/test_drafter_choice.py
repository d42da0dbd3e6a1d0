"""A target with heads and a drafter that nobody named: the faster one drafts, measured once."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import tiny_coder
from command_line import parsed, run_here
from dflash_local import Model, Stats, drafter_choice, load
from dflash_local.cli import serve
from dflash_local.cli.bench import chosen_pair
from dflash_local.cli.models_file import NamedModel
from dflash_local.cli.terminal import Speaker
from dflash_local.controller.calibration import budget_s
from dflash_local.doctor import trial
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.draft.fused_heads import FusedHeads
from dflash_local.draft.heads_drafter import HeadsDrafter
from dflash_local.drafter_choice import Speeds, answers
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError, FileError
from dflash_local.fit.pairing import check_heads
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import runtime
from dflash_local.pairs import tuned
from dflash_local.pairs.find import find_pair
from dflash_local.server.models.source import ModelSource
from heads import target_with_heads
from hybrid import TAPS, write_hybrid
from synthetic import write_drafter

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "kv_type": "q8_0", "n_gpu_layers": 0}
FLAGS = ("--ctx", "512", "--threads", "1", "--cache-type-k", "q8_0", "--gpu-layers", "0")
MEASURING = "the target's file has heads, and there is a drafter, too"
KINDS = {"heads": FusedHeads, "drafter": FusedDrafter}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target whose head is always right, and a drafter that never is."""
    folder = tmp_path_factory.mktemp("both")
    target = write_hybrid(folder / "target.gguf", "qwen35", tiny_coder.pair()[0], head=0.0)
    write_drafter(folder / "dflash-drafter.gguf", target, target_layers=TAPS)
    return folder


@pytest.fixture
def folder(written: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with nothing measured of it, where the tests' short calibration is long enough."""
    for kind in ("choices", "costs"):
        shutil.rmtree(cache_folder / kind, ignore_errors=True)
    monkeypatch.setattr(drafter_choice, "BUDGET_S", budget_s())
    return written


def kept(cache: Path) -> Iterator[Path]:
    """The files with speeds."""
    return (cache / "choices").glob("*.json")


def keep(cache: Path, heads: float, drafter: float) -> None:
    """Put other speeds in the place of the measured ones."""
    (path,) = kept(cache)
    path.write_text(json.dumps({"heads": heads, "drafter": drafter, "day": "2026-11-27"}))


def stats(emitted: int, seconds: float) -> Stats:
    found = Stats(decode_s=seconds)
    for _ in range(emitted):
        found.record_round(drafted=0, emitted=1)
    return found


def test_the_faster_one_drafts_and_is_measured_once(folder: Path, cache_folder: Path) -> None:
    """In a load, in a server, and in the commands the choice follows the speeds."""
    said: list[str] = []
    for n_loads in range(2):
        said.clear()
        with load(folder, say=said.append, **OPTIONS) as model:
            assert sum(line.startswith(MEASURING) for line in said) == (n_loads == 0)
            (told,) = (line for line in said if line.startswith("drafting with"))
            (path,) = kept(cache_folder)
            speeds = Speeds(**json.loads(path.read_text()))
            assert isinstance(model.drafter, KINDS["heads" if speeds.heads_win else "drafter"])
            assert speeds.heads > 0 and speeds.drafter > 0 and told == speeds.line
            assert model.plan and told in model.plan.notes
    for heads, drafter, best in ((84.0, 71.0, "heads"), (71.0, 84.0, "drafter")):
        keep(cache_folder, heads, drafter)
        said.clear()
        for width in ("auto", 4):
            with load(folder, say=said.append, draft_width=width, **OPTIONS) as model:
                assert isinstance(model.drafter, KINDS[best])
        words = ["the target's own heads", "the drafter"]
        one, other = words if best == "heads" else words[::-1]
        line = (
            f"drafting with {one}: 84.0 tokens/s, with {other} 71.0 (measured once on 2026-11-27)"
        )
        assert line in said and not any(each.startswith(MEASURING) for each in said)
        files = find_pair(folder, say=said.append)
        source = ModelSource("m", files.target, files.draft, OPTIONS, is_found=files.is_found)
        name = source.planner()(runtime.devices()).drafter_name
        assert name == (one if best == "heads" else "dflash-drafter.gguf")
        served = source.load()
        assert isinstance(served, Model) and isinstance(served.drafter, KINDS[best])
        served.close()


@pytest.mark.slow
def test_commands_tell_it(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "N_TOKENS", 12)
    arguments = ("--target", str(folder), *FLAGS, "--json")
    first = run_here("complete", "x", *arguments, "-n", "4")
    assert MEASURING in first.stderr and "drafting with" in first.stderr
    keep(cache_folder, 84, 71)
    told = json.loads(run_here("complete", "x", *arguments, "-n", "4").stdout)
    assert told["stats"]["drafter"] == "the target's heads"
    done = run_here("doctor", *arguments)
    told = json.loads(done.stdout)
    assert told["pair"]["drafter"] == "the target's own heads" and told["pair"]["has_heads"]
    assert any("note: drafting with the target's own heads: 84" in line for line in told["plan"])
    assert MEASURING not in done.stderr
    values = parsed("bench", ["--target", str(folder), *FLAGS])
    assert chosen_pair(values, Speaker(True)) == (folder / "target.gguf", None)
    done = run_here("calibrate", *arguments)
    assert MEASURING in done.stderr and "84.0" not in done.stderr
    keep(cache_folder, 71, 84)
    assert chosen_pair(values, Speaker(True)) == (
        folder / "target.gguf",
        folder / "dflash-drafter.gguf",
    )


@pytest.mark.slow
def test_what_is_named_is_not_measured(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = folder / "dflash-drafter.gguf"
    said: list[str] = []
    for draft, kind in (("mtp", FusedHeads), (drafter, FusedDrafter), ("none", type(None))):
        with load(folder, draft, say=said.append, **OPTIONS) as model:
            assert isinstance(model.drafter, kind)
    for width in (0, 8):  # no drafts, and more than the head takes
        with load(folder, draft_width=width, say=said.append, **OPTIONS) as model:
            assert model.engine.drafter is None or isinstance(model.drafter, FusedDrafter)
    monkeypatch.setattr(drafter_choice, "BUDGET_S", 2 * budget_s())
    with load(folder, say=said.append, **OPTIONS) as model:
        assert isinstance(model.drafter, FusedDrafter)
    assert not any(line.startswith((MEASURING, "drafting with")) for line in said)
    assert not list(kept(cache_folder))


def test_a_drafter_is_found_or_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = folder / "target.gguf", folder / "dflash-drafter.gguf"
    monkeypatch.setenv("DFLASH_LOCAL_TUNED", str(tmp_path / "data"))
    assert find_pair(folder, say=print).is_found
    assert not find_pair(target, say=print).is_found
    for draft in (drafter, "mtp", "none", "copies"):
        assert not find_pair(folder, draft, say=print).is_found
    for more, found in (((), True), (("--draft", str(drafter)), False)):
        values = parsed("serve", ["--target", str(folder), *more])
        assert serve._single(values, Speaker(True), None).is_found == found
    values = parsed("serve", [])
    assert serve._source(NamedModel("m", folder), values, print, None).is_found
    tuned.make_default(target, drafter, "org/one")
    assert find_pair(target, say=print).is_found


def test_speeds_decide() -> None:
    slow, fast = [stats(48, 2.0)] * 4, [stats(48, 1.0)] * 4
    for heads, drafter in ((slow, fast), (fast, slow)):
        found = Speeds.of(heads, drafter)
        assert found and found.heads_win == (heads is fast)
        assert {found.heads, found.drafter} == {24.0, 48.0}
    # The answers that both have given, as far as the slower one came.
    found = Speeds.of([stats(48, 1.0), stats(48, 9.0)], [stats(20, 1.0)])
    assert found and (found.heads, found.drafter) == (48.0, 20.0)


def test_too_few_tokens_tell_nothing(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in (Speeds.of([stats(5, 1.0)], [stats(48, 1.0)]), Speeds.of([], [])):
        assert (found.heads, found.drafter) == (0, 0) and not found.heads_win
    monkeypatch.setattr(drafter_choice, "_LONGEST_S", 0.0)
    said: list[str] = []
    with load(folder, say=said.append, **OPTIONS) as model:
        assert isinstance(model.drafter, FusedDrafter)
    assert any(line.startswith("the drafter drafts: the few tokens") for line in said)
    assert len(list(kept(cache_folder))) == 1
    said.clear()
    with load(folder, say=said.append, **OPTIONS):
        assert any(line.startswith("the drafter drafts: the few tokens") for line in said)
        assert not any("measuring once" in line for line in said)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_fails_while_it_is_measured_leaves_it_to_the_other(
    kind: str, folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise BackendError("no room for it")

    with load(folder, "none", quiet=True, **OPTIONS) as plain:
        expected = plain.generate("def add(", max_tokens=24).tokens
    monkeypatch.setattr(KINDS[kind], "draft", fail)
    said: list[str] = []
    with load(folder, say=said.append, **OPTIONS) as model:
        assert isinstance(model.drafter, KINDS["drafter" if kind == "heads" else "heads"])
        assert model.generate("def add(", max_tokens=24).tokens == expected
    failed = {"heads": "the target's own heads are", "drafter": "the drafter is"}[kind]
    assert f"{failed} not used: no room for it" in said
    assert not list(kept(cache_folder))


def test_a_drafter_that_fails_in_an_answer_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a context of its own, of 256 tokens, that is too small."""
    monkeypatch.setattr(drafter_choice, "N_TOKENS", 300)
    with target_with_heads(folder / "target.gguf", n_ctx=512) as target:
        spec = check_heads(GgufFile.open(target.path))
        model = Model(Engine(target, HeadsDrafter(target, spec, n_seq=1, n_ctx=200)))
        model.draft_width = 7
        with model, pytest.raises(BackendError, match="the heads have no room"):
            answers(model)


def test_a_drafter_s_bad_file_leaves_it_to_the_heads(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    drafter = other / "dflash-drafter.gguf"
    drafter.write_bytes(drafter.read_bytes()[:1000])
    said: list[str] = []
    with load(other, say=said.append, **OPTIONS) as model:
        assert isinstance(model.drafter, FusedHeads)
    assert any(line.startswith(f"the drafter is not used: {drafter}") for line in said)
    with pytest.raises(FileError):
        load(other, drafter, quiet=True, **OPTIONS)


@pytest.mark.slow
def test_another_setting_or_recalibration_measures_again(folder: Path, cache_folder: Path) -> None:
    load(folder, quiet=True, **OPTIONS).close()
    keep(cache_folder, 84, 71)
    for options, measures in (
        ({"n_ctx": 400}, False),
        ({"cache_mb": 16}, False),
        ({"kv_type": "f16"}, True),
        ({"recalibrate": True}, True),
    ):
        said: list[str] = []
        load(folder, say=said.append, **OPTIONS | options).close()
        assert any(line.startswith(MEASURING) for line in said) == measures, options
    assert not any("84.0 tokens/s" in line for line in said)
