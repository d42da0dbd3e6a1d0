"""A drafter from nothing: a run's files, that it learns, and how it goes on."""

import json
import os
import shutil
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
import tiny_coder
from dflash_local.errors import InputError
from dflash_local.pairs.find import find_pair
from dflash_local_tune import fitting, new
from dflash_local_tune.answers import Answer
from dflash_local_tune.beside import Beside
from dflash_local_tune.fitting import Interrupted, Progress, tune
from dflash_local_tune.new import NewRun, TrainOptions, ahead, options_for, train
from tune_runs import drafts_change_no_answer, snapshot

pytestmark = pytest.mark.slow

torch.set_num_threads(1)  # those of other tests want the cores as well


SMALL: dict[str, Any] = {
    **{"n_ctx": 512, "max_tokens": 24, "block_size": 4, "n_seq": 2, "n_written": 4},
    **{"n_gpu_layers": 0, "n_threads": 1},
}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainOptions:
    """A run of some steps for a copy of the tiny target, for a drafter of one layer."""
    monkeypatch.setenv("DFLASH_LOCAL_TUNED", str(tmp_path / "data"))
    monkeypatch.setattr("dflash_local_tune.new._RATE", 3.0)  # for so few steps
    target = Path(shutil.copy(tiny_coder.pair()[0], tmp_path))
    return options_for(target, tmp_path / "out", **SMALL, n_layer=1, steps=40)


def slowly(_: int) -> Iterator[tuple[int, list[Answer]]]:
    """Answers one by one, without an end."""
    ids = torch.zeros(3, 16, dtype=torch.int64)
    for i in count():
        time.sleep(0.02)
        yield i, [Answer(torch.arange(6), 3, torch.zeros(5, 2), ids, ids.float())]


@contextmanager
def opened(options: TrainOptions) -> Iterator[NewRun]:
    """A run before its first step."""
    part = options.draft.parent.parent
    part.mkdir()
    with ExitStack() as stack:
        yield NewRun(options, part, print, None, None, None, stack)


def test_a_drafter_from_nothing_learns_and_goes_on_after_a_stop(options: TrainOptions) -> None:
    seen: list[Progress] = []
    with pytest.raises(Interrupted):
        train(options, say=print, progress=seen.append, stopped=lambda: len(seen) == 25)
    part = options.output.with_name("out.partial")
    assert {"config.json", "model.safetensors", "state.pt"} <= {p.name for p in part.iterdir()}

    # What is left at any time is what another run can begin with.
    other = options_for(
        options.target,
        options.output.with_name("other"),
        **SMALL | {"block_size": None},
        begin=part,
        steps=1,
    )
    begun: list[Progress] = []
    with pytest.raises(Interrupted):
        train(other, say=print, progress=begun.append, stopped=lambda: bool(begun))
    assert float(begun[0].loss) < 0.5 * float(seen[0].loss)

    lines: list[str] = []
    card = train(options, say=lines.append, progress=seen.append)
    assert any("going on after step 25" in line for line in lines)
    assert seen[-1].step == 40
    assert float(seen[-1].loss) < 0.5 * float(seen[0].loss)
    greedy = [row for row in card.rows if row.temperature == 0]
    assert all(row.length_before == 1 for row in card.rows)
    assert max(row.length_after for row in greedy) > 1.1  # an untrained one: 1.0

    assert snapshot(options.output) == {
        *("README.md", "config.json", "model.safetensors", "out.gguf", "tune.json")
    }
    assert "trained from nothing" in (options.output / "README.md").read_text()
    assert json.loads((options.output / "tune.json").read_text())["before"] is None
    if card.is_default:
        assert find_pair(options.target, say=print).draft == card.after
    drafts_change_no_answer(options.target, card.after, 4)


def test_what_a_thread_makes_ahead_is_the_same_and_ends_with_its_reader() -> None:
    ended = threading.Event()

    def numbers(n: int) -> Generator[int]:
        try:
            yield from range(n)
            if n == 7:
                raise InputError("in the thread")
        finally:
            ended.set()

    assert list(ahead(numbers(50), 3)) == list(range(50))
    with pytest.raises(InputError, match="in the thread"):
        list(ahead(numbers(7), 3))
    ended.clear()
    endless = ahead(numbers(10**9), 3)
    assert [next(endless) for _ in range(20)] == list(range(20))
    assert not ended.is_set()
    endless.close()
    assert ended.is_set()


def test_steps_wait_for_answers_that_are_written_beside(options: TrainOptions) -> None:
    """A trainer that is faster than the writer does not go over the same answers for ever."""
    with opened(options) as run, closing(Beside(run._part / "answers", slowly)) as run._beside:
        run._n_new, n_taken, n_first = 2, 0, run._n_owed
        for step in range(4):
            n_taken += len(list(run._new(iter(()))))
            assert n_taken >= n_first + 2 * step
        assert run._n_asked > 0


def test_a_stop_while_a_step_waits_for_a_writer_keeps_the_state(options: TrainOptions) -> None:
    class Waiting(NewRun):
        def _make_plan(self, state: Mapping[str, Any]) -> None:
            super()._make_plan(state)
            self._beside = Beside(self._part / "answers", slowly)
            self._loaded.callback(self._beside.close)

    lines: list[str] = []
    with pytest.raises(Interrupted):
        tune(
            options,
            say=lines.append,
            stopped=lambda: any(line.endswith(" tokens per round before") for line in lines),
            kind=Waiting,
        )
    assert {"config.json", "model.safetensors", "state.pt"} <= snapshot(options.draft.parent.parent)


def test_the_latest_answers_take_no_memory_that_a_writer_still_has_to_take(
    options: TrainOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 24 << 30
    for module in (fitting, new):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)
    rings = []
    for least in (24, 99):  # with a writer beside the trainer, and without
        monkeypatch.setattr(new, "_HELD_AT_ONCE", least)
        settings = SMALL | {"n_ctx": 256, "n_written": 24}
        own = options_for(options.target, tmp_path / str(least), n_layer=1, **settings)
        with opened(own) as run:
            run._load()
            run._make_plan({})
            rings.append(run._open_ring().max_bytes)
    assert 2 * rings[1] == free - run._plan.bytes
    assert 2 * rings[0] <= 2 * rings[1] - new._BESIDE_BYTES - options.target.stat().st_size


def test_held_out_chats_may_come_in_parts_or_end_with_a_call(
    options: TrainOptions, tmp_path: Path
) -> None:
    """What they ask is known, so that no prompt that the target writes repeats it."""
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    lines = []
    for i in range(10, 34):
        parts = [{"type": "text", "text": f"{i}: Look"}, {"type": "text", "text": "it up"}]
        turns = [{"role": "user", "content": parts}]
        lines.append(turns if i % 2 else [*turns, {"role": "assistant", "tool_calls": [call]}])
    data = tmp_path / "requests.jsonl"
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in lines))
    with opened(replace(options, data=data)) as run:
        run._load()
        run._prompts()
    assert "" in run._known
    assert any(each.endswith(": look it up") for each in run._known)


def test_a_drafter_that_is_trained_further_gets_other_texts(
    options: TrainOptions, tmp_path: Path
) -> None:
    asked, held = [], []
    begin = None
    for name in ("one", "two"):
        own = options_for(
            options.target, tmp_path / name, **SMALL, n_layer=None if begin else 1, begin=begin
        )
        with opened(own) as run:
            run._load()
            texts, _ = run._prompts()
            asked.append([each.prompt for each in islice(run._asked(texts), 40)])
            held.append([*texts.watch, *texts.test])
        begin = own.draft.parent
    assert asked[0] != asked[1]
    assert held[0] == held[1]


def test_a_run_that_fails_leaves_everything_as_it_was(
    options: TrainOptions, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="no checkpoint to begin with"):
        train(replace(options, begin=tmp_path), say=print)
    assert snapshot(tmp_path) == before
    with pytest.raises(InputError, match="no answers; expected lines with"):
        train(replace(options, teacher_text=Path(os.devnull)), say=print)
    assert snapshot(tmp_path) == before

    def fail(line: str) -> None:
        if line.startswith("to train"):
            raise RuntimeError("in the middle of it")

    with pytest.raises(RuntimeError):
        train(options, say=fail)
    assert snapshot(tmp_path) == before


def test_a_disk_that_fills_later_loses_nothing_that_was_kept(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the disk."""
    monkeypatch.setattr("dflash_local_tune.new._SAVE_S", 0.0)
    resource = pytest.importorskip("resource")
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = replace(options, steps=8)
    part = options.output.with_name("out.partial")
    kept: list[bytes] = []

    def limited(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))

    def filling(progress: Progress) -> None:
        if progress.step == 4:
            kept.append((part / "state.pt").read_bytes())
            limited(1 << 16)

    try:
        with pytest.raises(InputError, match=r"state\.pt: cannot be written: .*; make room there"):
            train(options, say=print, progress=filling)
        assert (part / "state.pt").read_bytes() == kept[0]
        files = snapshot(part)
        assert "state.new" not in files

        # Where training has ended, what it brought is kept, and the next run only writes it.
        limited(most)
        lines: list[str] = []

        def full_in_the_end(line: str) -> None:
            lines.append(line)
            if line.endswith(" of 8 steps"):
                limited(1 << 16)

        with pytest.raises(InputError, match=r"out\.gguf: cannot be written"):
            train(options, say=full_in_the_end)
        assert "going on after step 3" in lines
        assert snapshot(part) == files
    finally:
        limited(most)
    lines = []
    train(options, say=lines.append)
    assert "going on after step 8" in lines
    assert (options.output / "out.gguf").exists()
    assert not part.exists()


@pytest.mark.parametrize("content", ["{{ m.content }}", "<{{ m.content }}{{ m.content }}"])
def test_a_template_without_an_opening_is_told(
    options: TrainOptions, tmp_path: Path, content: str
) -> None:
    template = f"{{% for m in messages %}}{content}{{% endfor %}}"
    key = (template, gguf_files.STRING, None)
    target = tmp_path / "changed.gguf"
    gguf_files.changed(options.target, target, keys={"tokenizer.chat_template": key})
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"changed\.gguf: its chat template must write"):
        train(replace(options, target=target), say=print)
    assert snapshot(tmp_path) == before
