"""Shows how much of a file is written: a bar on a terminal, elsewhere a line for every tenth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

import click

from .report import byte_size

if TYPE_CHECKING:
    from types import TracebackType

_STEP = 10
"""Percent between two lines."""


class WritingProgress:
    """`update` says how much is written. The bar is closed when the context ends."""

    def __init__(self, stream: TextIO, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._advance: Callable[[int], None] | None = None
        self._stack = ExitStack()
        self._done = 0
        self._shown = 0

    def __enter__(self) -> WritingProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes are written."""
        if self._quiet or total <= 0:
            return
        if self._stream.isatty():
            self._show_bar(done, total)
        else:
            self._show_line(done, total)

    def _show_bar(self, done: int, total: int) -> None:
        if self._advance is None:
            bar = click.progressbar(
                length=total, label=f"writing {byte_size(total)}", file=self._stream
            )
            self._advance = self._stack.enter_context(bar).update
        self._advance(done - self._done)
        self._done = done

    def _show_line(self, done: int, total: int) -> None:
        percent = 100 * done // total
        if percent // _STEP > self._shown // _STEP:
            self._shown = percent
            click.echo(f"writing {byte_size(total)}: {percent} %", file=self._stream)
