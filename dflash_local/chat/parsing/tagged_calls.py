"""Parses content with tool calls between marks, such as `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto

from dflash_local.chat.events import Content, Event, EventQueue
from dflash_local.chat.parsing.call_reader import CallReader
from dflash_local.chat.parsing.json_reader import State
from dflash_local.chat.parsing.marks import Fences, find, held

NewReader = Callable[[], CallReader]


class _TaggedState(Enum):
    CONTENT = auto()
    CALL = auto()
    CLOSING = auto()


class TaggedCallParser:
    """Parses content with calls between marks.

    `openings` are the marks that begin a call, each with whether the call itself begins with it;
    `closing` ends a call; `new_reader` makes a reader of what is between. White space around calls
    belongs to the format and is left out.
    """

    def __init__(self, openings: Mapping[str, bool], closing: str, new_reader: NewReader) -> None:
        self._openings = openings
        self._marks = tuple(openings)
        self._closing = closing
        self._new_reader = new_reader
        self._events = EventQueue()
        self._state = _TaggedState.CONTENT
        self._text = ""
        self._at = 0
        """How far `_text` was read. As long as a call is not certain, `_text` begins with its mark,
        so that all of it can become content again."""
        self._reader: CallReader | None = None
        self._is_certain = False
        self._blank = ""
        self._shown = True
        """Whether content was shown since the last call, or no call was made."""
        self._fences = Fences()

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._advance(last=False)
        return self._events.take()

    def finish(self) -> list[Event]:
        self._advance(last=True)
        if self._shown:
            self._events.add(Content(self._blank))
        self._blank = ""
        return self._events.take()

    def _advance(self, *, last: bool) -> None:
        steps = {
            _TaggedState.CONTENT: self._content,
            _TaggedState.CALL: self._call,
            _TaggedState.CLOSING: self._close,
        }
        while steps[self._state](last):
            pass

    def _content(self, last: bool) -> bool:
        """Show text up to the next call. False: more text is needed."""
        found = find(self._text, self._marks)
        if found is None:
            self._show(len(self._text) - (0 if last else held(self._text, self._marks)))
            return False
        where, mark = found
        self._show(where)
        if self._fences.inside:
            self._show(1)
            return True
        self._state, self._reader, self._is_certain = _TaggedState.CALL, self._new_reader(), False
        self._at = 0 if self._openings[mark] else len(mark)
        return True

    def _show(self, n: int) -> None:
        """Make the next `n` characters content; white space waits for what follows it."""
        text, self._text = self._text[:n], self._text[n:]
        self._fences.read(text)
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._shown = True
            self._events.add(Content(shown))

    def _call(self, last: bool) -> bool:
        """Read on in a call. False: more text is needed."""
        reader = self._reader
        assert reader is not None
        self._at = reader.read(self._text, self._at)
        if reader.name is not None:
            if not self._is_certain:
                self._is_certain = True
                self._blank, self._shown, self._fences = "", False, Fences()
                self._events.start_call(reader.name)
            self._events.add_arguments(reader.take())
            self._text, self._at = self._text[self._at :], 0
        if reader.state is State.READING and not (last and not self._is_certain):
            return False
        if self._is_certain:
            self._state = (
                _TaggedState.CLOSING if reader.state is State.DONE else _TaggedState.CONTENT
            )
            return True
        # It only looked like a call. Another one may begin behind its first character.
        self._state, self._at = _TaggedState.CONTENT, 0
        self._show(1)
        return True

    def _close(self, last: bool) -> bool:
        """Leave out the closing mark, if there is one."""
        rest = self._text.lstrip()
        if rest.startswith(self._closing):
            self._text = rest[len(self._closing) :]
        elif self._closing.startswith(rest) and not last:
            return False
        self._state = _TaggedState.CONTENT
        return True
