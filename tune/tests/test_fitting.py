"""A whole run with the tiny pair: its files, its stops, and how it goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import mini_pair
from adapters import write_lora
from dflash_local import setup
from dflash_local.draft.fused_drafter import TREE_TOP_K, FusedDrafter
from dflash_local.errors import BackendError, InputError, PairError
from dflash_local.pairs import tuned
from dflash_local.pairs.find import find_pair
from dflash_local_tune import comparison, fitting, state, texts
from dflash_local_tune.card import Card
from dflash_local_tune.fitting import (
    Interrupted,
    Progress,
    TuneOptions,
    errors_told,
    tune,
)
from dflash_local_tune.objective import position_weights
from dflash_local_tune.state import alone, claim, output_for, state_told, write_state
from ready_command import COMMAND
from synthetic import write_drafter, write_target
from tune_runs import drafts_change_no_answer, snapshot

torch.set_num_threads(1)  # those of other tests want the cores as well


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneOptions:
    """A run of some steps, of copies of the shipped files."""
    monkeypatch.setenv("DFLASH_LOCAL_TUNED", str(tmp_path / "data"))
    target, draft = (Path(shutil.copy(path, tmp_path)) for path in mini_pair.pair())
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in sorted(Path(json.__file__).parent.glob("*.py")):
        shutil.copy(path, texts)
    return TuneOptions(
        target,
        draft,
        texts,
        tmp_path / "out",
        steps=4,
        n_ctx=768,
        max_tokens=16,
        n_seq=2,
        n_gpu_layers=0,
        n_threads=1,
    )


class Watch:
    """The lines of a run, and the step at which to stop it."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.lines: list[str] = []
        self.steps: list[int] = []
        self._stop_after = stop_after

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, now: Progress) -> None:
        self.steps.append(now.step)

    def stopped(self) -> bool:
        return bool(self.steps) and self.steps[-1] == self._stop_after

    def run(self, options: TuneOptions) -> Card:
        return tune(options, say=self.say, progress=self.progress, stopped=self.stopped)


@pytest.fixture
def always_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(comparison, "MOST_LOSS", 0.0)


@pytest.mark.slow
def test_a_run_goes_on_after_it_was_stopped_and_its_drafter_can_be_undone(
    options: TuneOptions, always_wins: None
) -> None:
    first = Watch(stop_after=2)
    with pytest.raises(Interrupted):
        first.run(options)
    part = options.output.with_name("out.partial")
    assert not options.output.exists()
    assert (part / "state.pt").is_file()
    assert tuned.tuned_drafter(options.target) is None

    with pytest.raises(ValueError, match="interrupted run with other settings"):
        Watch().run(replace(options, max_tokens=17))
    second = Watch()
    card = second.run(options)
    assert second.steps == [3, 4]
    assert any("going on after step 2" in line for line in second.lines)
    assert not part.exists()
    names = {path.name for path in options.output.iterdir()}
    assert names == {"out.gguf", "README.md", "tune.json"}
    assert json.loads((options.output / "tune.json").read_text())["n_steps"] == 4
    text = (options.output / "README.md").read_text()
    for row in card.rows:
        assert re.search(rf"\| {row.length_before:.2f} +\| {row.length_after:.2f} +\|", text)
    assert len(card.rows) == 4

    assert card.won
    assert find_pair(options.target, say=print).draft == card.after
    drafts_change_no_answer(options.target, card.after, 8)
    assert tuned.undo(options.target) == card.after
    assert find_pair(options.target, say=print).draft is None
    assert card.after.is_file()


@pytest.mark.slow
def test_a_stop_before_a_step_has_its_answers_loses_nothing(options: TuneOptions) -> None:
    class Early(Watch):
        def stopped(self) -> bool:
            return any(line.endswith(" tokens per round before") for line in self.lines)

    first = Early()
    with pytest.raises(Interrupted):
        first.run(options)
    assert first.steps == []
    second = Watch(stop_after=1)
    with pytest.raises(Interrupted):
        second.run(options)
    assert "going on after step 0" in second.lines


@pytest.mark.slow
def test_a_drafter_of_an_adapted_target_is_no_default(
    options: TuneOptions, always_wins: None, tmp_path: Path
) -> None:
    lora = write_lora(tmp_path / "lora.gguf", options.target)
    card = Watch().run(replace(options, steps=1, lora=[lora]))
    assert card.won and not card.is_default
    assert "it won; give it where the target has the same adapters" in card.markdown()
    assert tuned.tuned_drafter(options.target) is None


@pytest.mark.slow
def test_a_drafter_that_does_not_win_stays_beside_the_old_one(
    options: TuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "LEAST_GAIN", 99.0)
    monkeypatch.setattr(fitting, "_PAUSE_S", 0.0)
    watch, asked = Watch(), iter([True, True])
    others = replace(options, data=None, steps=1)
    card = tune(others, say=watch.say, progress=watch.progress, busy=lambda: next(asked, False))
    assert next(asked, None) is None  # it waited until the others were idle
    assert watch.steps == [1]
    assert not card.won
    assert card.after.is_file()
    assert find_pair(options.target, say=print).draft is None
    text = (options.output / "README.md").read_text()
    assert "did not win" in text
    assert "all of them general" in text


def test_files_that_do_not_fit_leave_everything_as_it_was(
    options: TuneOptions, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "other.gguf")
    options = replace(options, draft=write_drafter(tmp_path / "other-draft.gguf", target))
    before = snapshot(tmp_path)
    with pytest.raises(PairError):
        Watch().run(options)
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_target_and_trainer_take_turns_where_memory_is_short(
    options: TuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "free_bytes", lambda device: 1)
    monkeypatch.setattr(fitting, "_AHEAD", 1)
    monkeypatch.setattr(fitting, "_TURN", 2)
    first = Watch(stop_after=3)
    with pytest.raises(Interrupted):
        first.run(options)
    assert any("by turns" in line for line in first.lines)
    second = Watch()
    card = second.run(options)
    assert second.steps == [4]
    assert card.trained == "low-rank additions to all matrices"
    assert len(card.rows) == 4


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_tuned_drafter_is_opened_as_the_old_one_was(
    options: TuneOptions, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "draft_window_of", lambda draft: 96)  # as the registry may know it
    with ExitStack() as stack:
        run = fitting.Run(options, options.output, print, None, None, None, stack)
        run._load(print, draft_shape=shape)
        before, after = run._drafter, run._opened_as_before(options.draft)
        assert isinstance(before, FusedDrafter) and isinstance(after, FusedDrafter)
        assert after.top_k == before.top_k == (TREE_TOP_K if shape == "tree" else 1)
        assert after.draft_window == before.draft_window == 96


def raised(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "given", "expected"),
    [
        (raised, [torch.OutOfMemoryError("CUDA out of memory.\nMore")], "set --ctx lower than 768"),
        (raised, [SafetensorError("header too large")], "header too large"),
        (torch.nn.Linear(3, 2), [torch.ones(2, 4)], "PyTorch failed: .*repeat the command"),
        (position_weights, [torch.ones(2, 4), torch.ones(2, 3)], "PyTorch failed: .*repeat"),
    ],
)
def test_what_a_library_raises_is_told_in_one_line(
    options: TuneOptions, call: Callable[..., object], given: list[Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected) as found, errors_told(options):
        call(*given)
    assert "\n" not in str(found.value)


def test_a_failure_of_others_stays_theirs(options: TuneOptions) -> None:
    for error in (BackendError("of llama.cpp"), RuntimeError("of a caller")):
        with pytest.raises(type(error), match=str(error)), errors_told(options):
            raise error


@pytest.mark.parametrize("content", [b"", b"no state", b"PK\3\4 cut off", None])
def test_a_damaged_state_is_told_at_once_and_stays(
    options: TuneOptions, content: bytes | None
) -> None:
    """As a full disk or another version leaves it."""
    part = options.output.with_name("out.partial")
    claim(part, fitting._settings(options))
    if content is None:
        write_state({"step": 1}, part / "state.pt")
    else:
        (part / "state.pt").write_bytes(content)
    watch = Watch()
    with pytest.raises(InputError, match="cannot be read as the state") as found:
        watch.run(options)
    assert str(part) in str(found.value) and "\n" not in str(found.value)
    assert not watch.lines
    assert (part / "state.pt").exists()


def test_a_state_of_another_drafter_is_told_in_one_line(tmp_path: Path) -> None:
    told = "cannot be read as the state"
    with pytest.raises(InputError, match=told), state_told(tmp_path / "state.pt"):
        torch.ones(2).copy_(torch.ones(3))


def test_a_disk_without_room_for_the_settings_leaves_no_folder(options: TuneOptions) -> None:
    """A limit on the size of files stands for the disk."""
    resource = pytest.importorskip("resource")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    part = options.output.with_name("out.partial")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(InputError, match=r"out\.partial: cannot be written"):
            claim(part, fitting._settings(options))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not part.exists()
    assert not claim(part, fitting._settings(options))  # once there is room


@pytest.mark.skipif(sys.platform == "win32", reason="locks no files")
def test_two_runs_do_not_share_a_folder(options: TuneOptions) -> None:
    class Ended(Exception):
        pass

    class First(Watch):
        def say(self, line: str) -> None:
            with pytest.raises(InputError, match="another run is writing there"):
                Watch().run(options)
            raise Ended

    part = options.output.with_name("out.partial")
    with pytest.raises(Ended):
        First().run(options)
    assert not part.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_where_files_cannot_be_locked_none_stays_open(
    options: TuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows renames no folder in which a file is open."""
    monkeypatch.setattr(state, "lock", lambda file: None)
    part = options.output.with_name("out.partial")
    claim(part, fitting._settings(options))
    with alone(part):
        names = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not any(part in name.parents for name in names)


def test_a_python_without_its_library_files_is_told_at_once(
    options: TuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "json.pyc").write_bytes(b"\0" * 400)
    monkeypatch.setattr(texts, "_LIBRARY", tmp_path / "empty")
    before = snapshot(tmp_path)
    watch = Watch()
    with pytest.raises(InputError, match=r"has no library files there.*use one that has them"):
        watch.run(options)
    assert not watch.lines
    assert snapshot(tmp_path) == before


def test_an_output_that_is_there_is_not_written_over(options: TuneOptions) -> None:
    options.output.mkdir()
    with pytest.raises(ValueError, match="exists already"):
        Watch().run(options)
    options.output.rmdir()
    options.output.symlink_to("nowhere")
    with pytest.raises(ValueError, match="exists already"):
        Watch().run(options)
    assert output_for(options.draft, given=True).parent == options.draft.parent
    assert output_for(options.draft, given=False).parent == tuned.folder() / "drafters"


@pytest.mark.slow
def test_what_takes_the_output_s_place_meanwhile_costs_no_training(options: TuneOptions) -> None:
    class Rival(Watch):
        def say(self, line: str) -> None:
            super().say(line)
            if line.startswith("held out, "):
                options.output.touch()

    assert options.data is not None
    if sys.platform == "linux":  # the card names it
        data = options.data.with_name(os.fsdecode(b"caf\xe9"))
        options = replace(options, data=options.data.rename(data))
    first = Rival()
    with pytest.raises(InputError, match="once nothing is there, the same command goes on"):
        first.run(options)
    assert first.steps == [1, 2, 3, 4]
    options.output.unlink()
    second = Watch()
    second.run(options)
    assert second.steps == []
    assert not {"state.pt", "settings.json"} & snapshot(options.output)


def test_a_drafter_is_tuned_beside_the_one_it_comes_from(options: TuneOptions) -> None:
    place = options.draft.parent
    folder = place / "Qwen3.6-27B-DFlash"
    folder.mkdir()
    assert output_for(folder, given=True) == place / "Qwen3.6-27B-DFlash-tuned"
    first = output_for(options.draft, given=True)
    first.mkdir()
    (first / f"{first.name}.gguf").touch()
    second = output_for(first / f"{first.name}.gguf", given=True)
    assert second == place / f"{options.draft.stem}-tuned-2"


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(options: TuneOptions) -> None:
    arguments = {
        "--target": options.target,
        "--draft": options.draft,
        "--data": options.data,
        "-o": options.output,
        "--ctx": 768,
        "-n": 16,
        "--threads": 1,
        "--steps": 500,
        "--gpu-layers": 0,
    }
    command = [str(COMMAND), "tune", *(str(part) for pair in arguments.items() for part in pair)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.search(r"^step 1,", line):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        assert process.wait(120) == 130
    assert "the same command goes on" in rest
    assert (options.output.with_name("out.partial") / "state.pt").is_file()
    assert not options.output.exists()
