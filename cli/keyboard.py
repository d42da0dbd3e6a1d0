"""The keyboard while an answer is written: nothing typed is shown, and Esc stops the answer."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.keys import Keys

if sys.platform != "win32":
    import termios
    import tty

_POLL_S = 0.05


@contextmanager
def listening(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when Esc is pressed. Other keys are kept for the line editor. Ctrl-C stays a
    signal. Nothing happens where the terminal is another process's at the moment."""
    keyboard = create_input(always_prefer_tty=True)
    over = threading.Event()

    def watch(keyboard: Input) -> None:
        was_idle = False
        while not over.wait(_POLL_S):
            pressed = keyboard.read_keys()
            if not pressed and was_idle:  # an Esc that begins no sequence of an arrow key
                pressed = keyboard.flush_keys()
            was_idle = not pressed
            if any(key.key == Keys.Escape for key in pressed):
                stop()
            store_typeahead(keyboard, [key for key in pressed if key.key != Keys.Escape])

    if not _is_ours(keyboard.fileno()):
        yield
        return
    with _without_echo(keyboard.fileno()):
        watcher = threading.Thread(target=watch, args=(keyboard,), name="dflash-local keyboard")
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _is_ours(descriptor: int) -> bool:
    if not os.isatty(descriptor):
        return False
    # A process in the background is stopped if it changes or reads the terminal.
    return sys.platform == "win32" or os.tcgetpgrp(descriptor) == os.getpgrp()


@contextmanager
def _without_echo(descriptor: int) -> Iterator[None]:
    if sys.platform == "win32":
        yield  # it shows only what a program reads as a line
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
