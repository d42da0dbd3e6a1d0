"""Parses an answer that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import TypeVar

from dflash_local.chat.events import Event, ToolCallArguments, ToolCallStart, call_id, joined

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

    def _mark(self, marks: Collection[str], at: int = 0) -> Waiting[str]:
        """Waits until it is certain with which of `marks` the text goes on at `at`, behind white
        space; "" if with none."""
        while True:
            rest = self._text[at:].lstrip()
            found = next((mark for mark in marks if rest.startswith(mark)), "")
            if found or self._last or not any(mark.startswith(rest) for mark in marks):
                return found
            yield

    def _skip_blanks(self) -> Waiting[None]:
        while not self._last and not self._text.strip():
            yield
        self._text = self._text.lstrip()

    def _start_call(self, name: str) -> None:
        self._events.append(ToolCallStart(self._n_calls, call_id(), name))
        self._n_calls += 1

    def _add_arguments(self, text: str) -> None:
        """A piece of the arguments of the call that started last."""
        self._events.append(ToolCallArguments(self._n_calls - 1, text))
