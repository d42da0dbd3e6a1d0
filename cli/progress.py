"""Shows how far long work is: bars on a terminal; elsewhere lines for a file that is written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from dflash_local.printable import printable

from .report import byte_size
from .terminal import Speaker

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from dflash_local.result import PromptProgress

_STEP = 10
"""Percent between two lines."""
_PATIENCE_S = 1.0
"""A prompt that is read sooner needs no bar."""


@contextmanager
def writing_progress(say: Speaker) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to be called with the bytes that are written and the bytes in all."""
    bar = None
    shown = 0  # bytes by the bar, percent by the lines
    with ExitStack() as stack:

        def update(done: int, total: int) -> None:
            nonlocal bar, shown
            if say.quiet or total <= 0:
                return
            label = f"writing {byte_size(total)}"
            if sys.stderr.isatty():
                if bar is None:
                    bar = stack.enter_context(
                        click.progressbar(length=total, label=label, file=sys.stderr)
                    )
                bar.update(done - shown)
                shown = done
                return
            percent = 100 * done // total
            if percent // _STEP > shown // _STEP:
                shown = percent
                say(f"{label}: {percent} %")

        yield update


@contextmanager
def loading_progress(
    console: Console | None, name: str
) -> Iterator[Callable[[float], None] | None]:
    """A bar on a terminal while a model is loaded; yields the `progress` of `dflash_local.load`."""
    if console is None:
        yield None
        return
    with _bar(console) as bar:
        name = printable(name)
        task = bar.add_task(f"loading {name}", total=1)

        def update(part: float) -> None:
            if part < 1:
                bar.update(task, completed=part)
            else:  # the drafter, and perhaps measuring what it costs
                bar.update(task, description=f"preparing {name}", total=None)

        yield update


@contextmanager
def prompt_progress(
    console: Console | None,
) -> Iterator[Callable[[PromptProgress | None], None]]:
    """A bar on a terminal while a long prompt is read. Gives a function for what the model tells of
    that; None, for the first word of the answer, takes the bar away."""
    if console is None:
        yield lambda told: None
        return
    bar = _bar(console)
    task = bar.add_task("")
    patience = threading.Timer(_PATIENCE_S, bar.start)

    def update(told: PromptProgress | None) -> None:
        if told is not None:
            about = f"reading {told.n} tokens"
            bar.update(task, description=about, total=told.n, completed=told.n_read)
            if patience.ident is None:
                patience.start()
        elif patience.ident is not None:
            patience.cancel()
            patience.join()
            bar.stop()

    try:
        yield update
    finally:
        update(None)


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
