"""Answers that processes of their own write beside the trainer.

In one process both would hold Python's lock in turns, and the GPU would wait for either. The
answers come as files, some megabytes each: one read takes a whole one, and memory shared by other
means is scarce in a container.
"""

import multiprocessing
import os
import queue
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_local.errors import BackendError, DflashError
from dflash_local_tune.answers import Answer, moved
from dflash_local_tune.state import write_state

Write = Callable[..., Iterator[tuple[int, list[Answer]]]]

MOST_FILES = 64
"""Files that wait for the trainer, at most."""
_ASKED_S = 1.0
"""Between two looks at whether the other process is still there."""


class Beside:
    """`n` processes that call `write`, a function of a module, with these arguments and their
    number, 0 to n - 1, and send its items: answers, and the number of prompts asked for so far.
    `n_files` of their files lie in `folder`, which `close` removes, beside one that each of them
    has written and one that is read. They end with this process, however that ends."""

    def __init__(
        self, folder: Path, write: Write, *arguments: Any, n: int = 1, n_files: int = MOST_FILES
    ) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        folder.mkdir()
        spawning = multiprocessing.get_context("spawn")  # a fork could not use the GPU
        self._queue: Any = spawning.Queue(n_files)
        self._processes = [
            spawning.Process(
                target=_work,
                args=(self._queue, folder / str(i), write, (*arguments, i)),
                name=f"writer {i}",
                daemon=True,
            )
            for i in range(n)
        ]
        try:
            for i, process in enumerate(self._processes):
                (folder / str(i)).mkdir()
                with _interrupts_ignored():
                    process.start()
        except BaseException:
            self.close()
            raise

    def take(
        self, least: int, device: str, check: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, list[Answer]]]:
        """All items that are ready, with features on `device`; it waits for `least` answers, and
        calls `check`, which may raise, while it does. Each is read when it is asked for. Raises a
        process's error."""
        n = 0
        while (sent := self._next(n < least, check)) is not None:
            n_asked, path = sent
            found = _read(path, device)
            path.unlink()
            n += len(found)
            yield n_asked, found

    def _next(self, wait: bool, check: Callable[[], None]) -> tuple[int, Path] | None:
        while True:
            if wait:
                check()
            with suppress(queue.Empty):
                sent = self._queue.get(timeout=_ASKED_S) if wait else self._queue.get_nowait()
                if isinstance(sent, BaseException):
                    raise sent
                return sent  # type: ignore[no-any-return]
            ended = [each.exitcode for each in self._processes if not each.is_alive()]
            if ended and self._queue.empty():
                raise BackendError(
                    f"a process that writes answers ended with code {ended[0]}; see whether the "
                    "machine has memory left for it"
                )
            if not wait:
                return None

    def close(self) -> None:
        """End the processes, and remove their files. Safe to call again."""
        begun = [each for each in self._processes if each.pid is not None]
        for each in begun:
            each.kill()  # it has nothing to save
        for each in begun:
            each.join()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process that begins meanwhile ignores Ctrl-C from its first moment on. Before `_work` it
    loads PyTorch, which takes seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(sent: Any, folder: Path, write: Write, arguments: Sequence[Any]) -> None:
    # Ctrl-C reaches both; the trainer decides. Windows hands no handling of signals down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def send(item: Any) -> None:
        while trainer.is_alive():
            with suppress(queue.Full):
                sent.put(item, timeout=_ASKED_S)
                return
        os._exit(1)  # nobody reads what is in the queue

    def deliver(path: Path, n_asked: int, answers: Sequence[Answer]) -> None:
        _write(path, answers)
        send((n_asked, path))

    try:
        # A thread saves what is written while the next texts are.
        with ThreadPoolExecutor(1) as pool:
            saved: Future[None] | None = None
            for i, (n_asked, answers) in enumerate(write(*arguments)):
                if saved:
                    saved.result()
                saved = pool.submit(deliver, folder / f"{i}.pt", n_asked, answers)
            if saved:
                saved.result()
    except DflashError as error:
        send(type(error)(str(error)))
    except Exception as error:
        send(BackendError(f"a process that writes answers failed: {error!r}"))
    sent.close()
    sent.join_thread()


def _write(path: Path, answers: Sequence[Answer]) -> None:
    """The parts of all answers one behind the other: few large tensors are read fast. Raises
    InputError."""
    parts = {
        name: torch.cat([getattr(each, name).cpu() for each in answers])
        for name in ("tokens", "features", "label_ids", "label_probs")
    }
    sizes = [(len(a.tokens), a.n_prompt, len(a.features), len(a.label_ids)) for a in answers]
    write_state(parts | {"sizes": torch.tensor(sizes)}, path)


def _read(path: Path, device: str) -> list[Answer]:
    parts: dict[str, Tensor] = torch.load(path, weights_only=True)
    n_tokens, n_prompt, n_rows, n_labels = parts["sizes"].T.tolist()
    return [
        Answer(tokens, n, *rest)
        for tokens, n, *rest in zip(
            torch.split(parts["tokens"], n_tokens),
            n_prompt,
            torch.split(moved(parts["features"], torch.device(device)), n_rows),
            torch.split(moved(parts["label_ids"], torch.device(device)), n_labels),
            torch.split(moved(parts["label_probs"], torch.device(device)), n_labels),
            strict=True,
        )
    ]
