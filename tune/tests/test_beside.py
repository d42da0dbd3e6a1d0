"""Processes that write beside the trainer: answers stay the same, and errors are told."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import mini_pair
from dflash_local.errors import BackendError, InputError
from dflash_local_tune.answers import Answer
from dflash_local_tune.beginning import write_beginning
from dflash_local_tune.beside import Beside, Write
from dflash_local_tune.new import options_for, written

pytestmark = pytest.mark.slow


def answer(i: int) -> Answer:
    n, ids = 10 + i, torch.arange(12 * 16).reshape(12, 16)
    features = torch.full((n - 1, 3), i + 0.5, dtype=torch.bfloat16)
    return Answer(torch.arange(n), i, features, ids, ids.float())


def some(n: int, _: int) -> Iterator[tuple[int, list[Answer]]]:
    """Answers, and then none for long, an error, or the end of the process."""
    for i in range(n):
        yield i, [answer(i), answer(i + 1)]
    if n == 2:
        raise InputError("in the process")
    if n == 1:
        os._exit(3)
    time.sleep(1000)


def on_a_full_disk(_: int) -> Iterator[tuple[int, list[Answer]]]:
    """A limit on the size of files stands for the disk."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    yield 0, [answer(0)]


def taken(beside: Beside, least: int) -> tuple[int, list[Answer]]:
    items = list(beside.take(least, "cpu"))
    return items[-1][0], [each for _, found in items for each in found]


def same(a: Answer, b: Answer) -> bool:
    names = "tokens", "features", "label_ids", "label_probs"
    equal = (torch.equal(getattr(a, name), getattr(b, name)) for name in names)
    return a.n_prompt == b.n_prompt and all(equal)


def test_answers_arrive_as_they_were(tmp_path: Path) -> None:
    beside = Beside(tmp_path / "answers", some, 3)
    n_asked, found = taken(beside, 6)
    expected = [answer(i + j) for i in range(3) for j in range(2)]
    assert n_asked == 2
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert list(beside.take(0, "cpu")) == []
    beside.close()
    assert not list(tmp_path.iterdir())


def test_a_file_is_read_when_the_one_before_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    beside = Beside(folder, some, 3)
    found = beside.take(6, "cpu")
    assert len(next(found)[1]) == 2
    while not (folder / "0" / "2.pt").exists() and beside._processes[0].is_alive():
        time.sleep(0.01)
    assert sorted(path.name for path in (folder / "0").iterdir()) == ["1.pt", "2.pt"]
    assert [n_asked for n_asked, _ in found] == [1, 2]
    beside.close()


@pytest.mark.one_in(3)
@pytest.mark.skipif(sys.platform == "win32", reason="limits no files")
@pytest.mark.parametrize(
    ("write", "kind", "told"),
    [
        (partial(some, 2), InputError, "in the process"),
        (partial(some, 1), BackendError, "ended with code 3"),
        (on_a_full_disk, InputError, r"0\.pt: cannot be written: .*; make room there"),
    ],
)
def test_what_ends_the_process_is_told_here(
    tmp_path: Path, write: Write, kind: type[Exception], told: str
) -> None:
    beside = Beside(tmp_path / "answers", write)
    with pytest.raises(kind, match=told) as found:
        taken(beside, 100)
    assert "\n" not in str(found.value)
    beside.close()


def test_few_files_wait_for_the_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    beside = Beside(folder, some, 5, n_files=1)
    last = folder / "0" / "1.pt"  # one that waits, and one that the process has written
    while not last.exists() and beside._processes[0].is_alive():
        time.sleep(0.01)
    time.sleep(0.5)  # long enough to write all others
    assert len(list(last.parent.iterdir())) == 2
    assert len(taken(beside, 10)[1]) == 10
    beside.close()


def test_who_waits_for_answers_can_be_stopped(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    beside = Beside(tmp_path / "answers", some, 3)
    with pytest.raises(InterruptedError):
        next(beside.take(100, "cpu", stop))
    beside.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="ends a process by this signal")
def test_a_process_that_has_just_begun_leaves_ctrl_c_to_the_trainer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    beside = Beside(tmp_path / "answers", some, 3)
    assert signal.getsignal(signal.SIGINT) is before
    for process in beside._processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    assert len(taken(beside, 6)[1]) == 6
    beside.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_target_writes_in_processes_of_their_own(tmp_path: Path) -> None:
    options = options_for(
        mini_pair.pair()[0],
        tmp_path / "out",
        n_ctx=256,
        max_tokens=16,
        n_layer=1,
        n_seq=2,
        n_written=4,
        n_gpu_layers=0,
        n_threads=1,
    )
    part = tmp_path / "out.partial"
    part.mkdir()
    write_beginning(options.draft.parent, options.target, n_layer=1)
    beside = Beside(part / "answers", written, options, part, 5, 2, n=2)
    n_asked, found = taken(beside, 24)
    beside.close()
    assert n_asked >= 5 + 12
    assert all(len(each.features) == len(each.tokens) - 1 for each in found)
    texts = [tuple(each.tokens.tolist()) for each in found]
    assert len(set(texts)) > len(texts) // 2  # the two ask for other prompts
