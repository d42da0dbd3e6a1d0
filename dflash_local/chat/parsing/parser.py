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

    def _up_to(self, marks: Sequence[str], give: Callable[[int], None]) -> Waiting[str]:
        """Gives how much of the text is certain to be before the first of `marks`, as it comes;
        returns that mark, with which the text goes on then, "" at the end of the answer."""
        while True:
            found = find(self._text, marks)
            if found is None:
                give(len(self._text) - (0 if self._last else held(self._text, marks)))
                if self._last:
                    return ""
            else:
                give(found[0])
                if self._last or not any(
                    mark != found[1] and mark.startswith(self._text) for mark in marks
                ):
                    return found[1]
            yield

    def _take(self, n: int) -> str:
        text, self._text = self._text[:n], self._text[n:]
        return text

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
