"""The meaning of Ctrl-C: it ends an answer, or the whole process where nothing else can end it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def setting(event: threading.Event) -> Iterator[None]:
    """The first Ctrl-C sets `event`, a second one raises KeyboardInterrupt."""

    def stop(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    with _handled(stop):
        yield


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ctrl-C ends the process at once.

    For work inside llama.cpp: an exception would wait until llama.cpp returns, and be lost if it
    was raised in a callback.
    """
    with _handled(signal.SIG_DFL):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
