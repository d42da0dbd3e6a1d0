"""Streams one answer to stdout. Ctrl-C or Esc stops it, and what came so far is kept."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, cast

import dflash_local
from dflash_local.printable import shown

from . import interrupt
from .progress import prompt_progress
from .terminal import Speaker, fitted, is_rich, open_console

Ask = Callable[..., "Iterator[dflash_local.Chunk]"]
"""`Model.stream` with everything bound but `cancel`."""


def answer(
    ask: Ask,
    show: Callable[[dflash_local.Chunk], None] | None = None,
    cancel: threading.Event | None = None,
) -> dflash_local.Result:
    """One answer, whose chunks go to `show`. The first Ctrl-C ends it by `cancel`, a second one
    raises KeyboardInterrupt."""
    cancel = cancel or threading.Event()
    result: dflash_local.Result | None = None
    with interrupt.setting(cancel):
        # Closing a stream, which is a generator, cancels its request.
        stream = cast("Generator[dflash_local.Chunk, None, None]", ask(cancel=cancel))
        with contextlib.closing(stream):
            for chunk in stream:
                if show is not None:
                    show(chunk)
                result = chunk.result or result
    if result is None:
        raise RuntimeError("the stream of an answer ended without its result")
    return result


def write_answer(
    ask: Ask, say: Speaker, *, is_chat: bool, ends_line: bool = False
) -> dflash_local.Result:
    """Stream one answer to stdout, while `say` holds its lines back. The thoughts of a chat are
    shown only on a terminal. A line break ends the answer on a terminal; with `ends_line`,
    everywhere."""
    cancel = threading.Event()
    is_terminal = sys.stdout.isatty()
    written = ""
    with contextlib.ExitStack() as stack:
        stack.enter_context(say.answering())
        if is_terminal or ends_line:
            from .keyboard import listening

            stack.enter_context(listening(cancel.set))
        tell = stack.enter_context(prompt_progress(say.console))
        view = None
        if is_rich(sys.stdout):
            from .answer_view import AnswerView

            view = AnswerView(open_console(sys.stdout))
        thinking = False

        def show(chunk: dflash_local.Chunk) -> None:
            nonlocal written, thinking
            if chunk.prompt is not None:
                tell(chunk.prompt)
            thought = chunk.reasoning if is_terminal else ""
            text = chunk.content if is_chat else chunk.text
            if view is not None:
                view.add(chunk.pieces)
            for new, is_thought in ((thought, True), (text, False)):
                if not new:
                    continue
                tell(None)
                if thinking and not is_thought:
                    if view is not None:
                        view.end_thought()
                    else:
                        write_stdout("\n\n")
                written, thinking = new, is_thought
                say.in_line = not written.endswith("\n")
                if view is not None:
                    view.write(new, is_thought=is_thought)
                else:
                    write_stdout(new)

        result = None
        try:
            asked = partial(ask, prompt_progress=say.console is not None)
            result = answer(asked, show, cancel)
        finally:
            tell(None)
            if view is not None:
                view.finish()
            unended = is_terminal and not written.endswith("\n")
            if (written or result) and (unended or ends_line):
                write_stdout("\n")
                say.in_line = False
        return result


def write_stdout(text: str) -> None:
    """Write text at once. A terminal gets no control characters: they could change its settings."""
    flush_stdout(shown(text) if sys.stdout.isatty() else text)


def flush_stdout(text: str = "") -> None:
    """Write the text and what is left. An error says that it is stdout's."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def write_json(value: Any) -> None:
    write_stdout(json.dumps(value) + "\n")


def write_report(text: str) -> None:
    """Write facts to stdout. On a terminal long lines break between words; after a name, they go on
    under its value. Rows of tables stay as they are."""
    if columns := stdout_columns():
        text = fitted(text, columns)
    write_stdout(text)


def stdout_columns() -> int | None:
    """The width of stdout, if it is a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
