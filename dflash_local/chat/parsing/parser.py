"""Parses an answer that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from dflash_local.chat.events import Event, ToolCallArguments, ToolCallStart, call_id, joined
from dflash_local.chat.parsing.marks import find, held

_T = TypeVar("_T")
Waiting = Generator[None, None, _T]
"""A coroutine that yields where it needs more of the text."""


class Parser:
    """Turns one answer's text into events.

    However the text is cut into pieces, the events join to the same. Text is held back only as long
    as it may still become a mark of the dialect or a call. What only looks like a call comes out as
    content, unchanged: broken JSON, an unknown tool, no end, or a call inside a code block.
    """

    def __init__(self) -> None:
        self._text = ""
        """What has come and is not parsed yet."""
        self._blank: list[str] = []
        """White space before `_text`, of which it is not known yet whether it belongs to a text."""
        self._last = False
        """Whether no more comes."""
        self._events: list[Event] = []
        self._n_calls = 0
        self._steps = self._parse()

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        self._text += text
        next(self._steps, None)
        events, self._events = joined(self._events), []
        return events

    def finish(self) -> list[Event]:
        """The events of the text that was held back: the answer has ended."""
        self._last = True
        return self.feed("")

    def _parse(self) -> Waiting[None]:
        """Parses all of the answer."""
        raise NotImplementedError

    def _mark(self, marks: Collection[str]) -> Waiting[str]:
        """Waits until it is certain with which of `marks` the text goes on, behind white space; ""
        if with none."""
        while True:
            self._set_aside(len(self._text) - len(self._text.lstrip()))
            found = next((mark for mark in marks if self._text.startswith(mark)), "")
            if found or self._last or not any(mark.startswith(self._text) for mark in marks):
                return found
            yield

    def _up_to(self, marks: Sequence[str], give: Callable[[int], None]) -> Waiting[str]:
        """Gives how much of the text is certain to be before the first of `marks`, as it comes;
        returns that mark, with which the text goes on then, "" at the end of the answer."""
        while True:
            n_held = 0 if self._last else held(self._text, marks)
            where, mark = find(self._text, marks) or (len(self._text) - n_held, "")
            give(where)
            is_longer = any(other != mark and other.startswith(self._text) for other in marks)
            if self._last or (mark and not is_longer):
                return mark
            yield

    def _take(self, n: int) -> str:
        """The next `n` characters of the text, with the white space before them."""
        taken = "".join([*self._blank, self._text[:n]])
        self._text, self._blank = self._text[n:], []
        return taken

    def _set_aside(self, n: int) -> None:
        """The next `n` characters are white space, and wait for what follows."""
        self._blank.append(self._text[:n])
        self._text = self._text[n:]

    def _start_call(self, name: str) -> None:
        self._blank = []
        self._events.append(ToolCallStart(self._n_calls, call_id(), name))
        self._n_calls += 1

    def _add_arguments(self, text: str) -> None:
        """A piece of the arguments of the call that started last."""
        self._events.append(ToolCallArguments(self._n_calls - 1, text))
