"""Streams one answer. Ctrl-C stops it, and what came so far is kept."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from dflash_local.printable import shown

from . import interrupt

if TYPE_CHECKING:
    from dflash_local import Chunk, Result

Ask = Callable[..., "Iterator[Chunk]"]
"""`Model.stream` or `Model.stream_chat`, with everything bound but `cancel`."""


def answer(ask: Ask, write: Callable[[str], None]) -> Result:
    """Stream one answer into `write`. The first Ctrl-C ends it, a second one raises
    KeyboardInterrupt."""
    cancel = threading.Event()
    result: Result | None = None
    with interrupt.setting(cancel), contextlib.closing(_generator(ask(cancel=cancel))) as chunks:
        for chunk in chunks:
            if chunk.text:
                write(chunk.text)
            result = chunk.result or result
    if result is None:
        raise RuntimeError("the stream of an answer ended without its result")
    return result


def write_stdout(text: str) -> None:
    """Write text at once. A terminal gets no control characters: they could change its settings."""
    sys.stdout.write(shown(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_nothing(text: str) -> None:
    """For an answer that is shown later or not at all."""


def _generator(chunks: Iterator[Chunk]) -> Generator[Chunk, None, None]:
    # Closing a generator closes the one that it yields from, which cancels the request.
    yield from chunks
