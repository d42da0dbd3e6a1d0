"""Shows how much of a file is written: a bar on a terminal, elsewhere a line for every tenth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

import click

from .report import byte_size

_STEP = 10
"""Percent between two lines."""


@contextmanager
def writing_progress(stream: TextIO, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that takes the bytes that are written and the bytes in all."""
    bar = None
    shown = 0  # bytes by the bar, percent by the lines
    with ExitStack() as stack:

        def update(done: int, total: int) -> None:
            nonlocal bar, shown
            if quiet or total <= 0:
                return
            label = f"writing {byte_size(total)}"
            if stream.isatty():
                if bar is None:
                    bar = stack.enter_context(
                        click.progressbar(length=total, label=label, file=stream)
                    )
                bar.update(done - shown)
                shown = done
                return
            percent = 100 * done // total
            if percent // _STEP > shown // _STEP:
                shown = percent
                click.echo(f"{label}: {percent} %", file=stream)

        yield update
