"""Parses content with tool calls in it, by the form of the model's calls."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from dflash_local.chat.events import Content, Event, EventQueue
from dflash_local.chat.form import Form, marks_of
from dflash_local.chat.parsing.call_reader import CallReader
from dflash_local.chat.parsing.json_reader import State
from dflash_local.chat.parsing.marks import Fences, find, held
from dflash_local.chat.tool import Tool


class _State(Enum):
    CONTENT = auto()
    CALL = auto()
    CLOSING = auto()


class CallParser:
    """Parses content with calls of `tools`, by name.

    White space around calls belongs to the format and is left out. Calls without a mark, as Llama
    3.1's, are such only at the beginning of an answer, perhaps behind a `tag`, and behind each
    other. `silent` marks around content are left out.
    """

    def __init__(
        self, form: Form, tools: Mapping[str, Tool], *, tag: str = "", silent: tuple[str, ...] = ()
    ) -> None:
        self._form = form
        self._tools = tools
        self._silent = silent
        self._openings = form.openings
        self._marks = (*self._openings, *silent)
        again = marks_of(form.again)[:1]
        self._again = again[0] if again else ""
        self._closings = tuple(form.closings | ({";", tag} - {""} if form.is_bare else set()))
        self._events = EventQueue()
        self._state = _State.CLOSING if form.is_bare else _State.CONTENT
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
            _State.CONTENT: self._content,
            _State.CALL: self._call,
            _State.CLOSING: self._close,
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
        if not last and any(m != mark and m.startswith(self._text) for m in self._marks):
            return False
        if mark in self._silent:
            self._text = self._text[len(mark) :]
        elif self._fences.inside:
            self._show(1)
        else:
            self._begin(len(mark), self._openings[mark])
        return True

    def _begin(self, at: int, lead: str) -> None:
        self._state, self._at, self._is_certain = _State.CALL, at, False
        self._reader = CallReader(self._form, self._tools, lead)

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
            self._state = _State.CLOSING if reader.state is State.DONE else _State.CONTENT
            return True
        # It only looked like a call. Another one may begin behind its first character.
        self._state, self._at = _State.CONTENT, 0
        self._show(1)
        return True

    def _close(self, last: bool) -> bool:
        """Leave out what belongs to the calls, up to the next call or to content."""
        rest = self._text[self._at :].lstrip()
        self._at = len(self._text) - len(rest)
        marks = tuple(mark for mark in (self._again, *self._closings) if mark)
        mark = next((mark for mark in marks if rest.startswith(mark)), "")
        if not mark and not last and any(each.startswith(rest) for each in marks):
            return False
        if mark and mark == self._again:
            lead = self._form.again
            self._begin(self._at + len(mark), lead[lead.index(mark) + len(mark) :])
        elif mark and self._events.n_calls:
            self._text, self._at = rest[len(mark) :], 0
        elif mark:
            self._at += len(mark)
        elif self._again or not rest:
            self._text = rest if self._events.n_calls else self._text
            self._at, self._state = 0, _State.CONTENT
        else:
            self._begin(self._at, "")
        return True
