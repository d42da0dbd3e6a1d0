"""Parses an answer that arrives piece by piece, and JSON (RFC 8259) in it, up to where this ends or
goes wrong."""

import json
import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from dflash_local.chat.events import Event, ToolCallArguments, ToolCallStart, call_id, joined
from dflash_local.chat.parsing.marks import held
from dflash_local.chat.parsing.values import ALL_TYPES, typed

_BLANKS = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE_BEGUN = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{0,4})?')
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_BEGUN = re.compile(
    r"t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?"
)
# Python's own parser refuses numbers of thousands of digits and very deep nesting.
_MAX_NUMBER = 400
_MAX_DEPTH = 200
_LONGEST_KEY = 1000

_T = TypeVar("_T")
Waiting = Generator[None, None, _T]
"""A coroutine that yields where it needs more of the text."""


class Unexpected(Exception):
    """A character that is not allowed where it stands."""


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
        self._at = 0
        """How far `_text` was read. As long as it is not certain that this is a call, all of it may
        become content again."""
        self._is_certain = False
        self._is_json = False
        """Whether what is read is JSON of the arguments, which are told as they are written."""
        self._steps = self._parse()

    def feed(self, text: str, *, is_last: bool = False) -> list[Event]:
        """The events of the next piece of the answer; of the last one, all that was held back."""
        self._text += text
        self._last = is_last
        next(self._steps, None)
        events, self._events = joined(self._events), []
        return events

    def _parse(self) -> Waiting[None]:
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
            text = self._text
            found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
            n_held = 0 if found or self._last else held(text, marks)
            where, _, mark = min(found, default=(len(text) - n_held, 0, ""))
            give(where)
            longer = (other for other in marks if other != mark and other.startswith(self._text))
            if self._last or (mark and not any(longer)):
                return mark
            yield

    def _take(self, n: int) -> str:
        """The next `n` characters of the text, with the white space before them."""
        taken, self._text = self._text[:n], self._text[n:]
        if self._blank:
            taken, self._blank = "".join([*self._blank, taken]), []
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

    # Calls, of which it may not be certain yet that they are such

    def _tried(self, reading: Waiting[None]) -> Waiting[bool]:
        """Whether what is read comes to its end. Else `_text` begins behind it with what is not
        allowed, if it was certain."""
        try:
            yield from reading
            return True
        except Unexpected:
            self._at -= 1
            return False
        finally:
            self._tell()
            self._is_json = False

    def _json(self) -> Waiting[None]:
        """Reads a JSON object from its `{` on."""
        self._tell()
        self._at, self._is_json = self._at + 1, True
        yield from self._value("{")
        self._tell()
        self._is_json = False

    def _tell(self) -> None:
        """Keep no text that was read and is certain. JSON of the arguments is added to these."""
        if self._is_certain:
            read, self._at = self._take(self._at), 0
            if self._is_json:
                self._add_arguments(read)

    def _next(self) -> Waiting[str]:
        """The next character. With `_at` one less it comes again."""
        while self._at == len(self._text):
            if self._last:
                self._at += 1  # as if something followed
                raise Unexpected
            self._tell()
            yield
        self._at += 1
        return self._text[self._at - 1]

    def _piece(self) -> Waiting[str]:
        """All that has come, at least one character; `_at` gives back what is too much."""
        begin = yield from self._next()
        rest, self._at = self._text[self._at :], len(self._text)
        return begin + rest

    def _solid(self) -> Waiting[str]:
        """The next character that is not blank."""
        while (char := (yield from self._next())) in _BLANKS:
            pass
        return char

    def _expect(self, expected: str) -> Waiting[None]:
        """Raises Unexpected unless this is the next mark."""
        if (yield from self._solid()) != expected:
            raise Unexpected

    def _until(self, end: str) -> Waiting[str]:
        """The text before `end`, on one line."""
        text = ""
        while not text.endswith(end):
            text += yield from self._next()
            if len(text) > _LONGEST_KEY or "\n" in text.strip():
                raise Unexpected
        return text.removesuffix(end)

    def _value(self, char: str, quote: str = "", depth: int = 0) -> Waiting[None]:
        """Reads a value that begins with `char`.

        With a `quote` it is like JSON, in which texts have this one and keys have none, and it is
        told as JSON.
        """
        if char not in "{[":
            yield from self._loose(char, quote) if quote else self._simple(char)
            return
        if depth == _MAX_DEPTH:
            raise Unexpected
        close = "}" if char == "{" else "]"
        if quote:
            self._add_arguments(char)
        char = yield from self._solid()
        self._at -= char != close
        while char != close:
            if close == "}" and quote:
                key = yield from self._until(":")
                self._add_arguments(f'"{escaped(key.strip())}": ')
            elif close == "}":
                yield from self._expect('"')
                yield from self._string()
                yield from self._expect(":")
            yield from self._value((yield from self._solid()), quote, depth + 1)
            char = yield from self._solid()
            if char not in (close, ","):
                raise Unexpected
            if quote and char == ",":
                self._add_arguments(", ")
        if quote:
            self._add_arguments(close)

    def _simple(self, char: str) -> Waiting[None]:
        """Reads a string, a number or a word from its first character. The latter two end before
        the character behind them."""
        if char == '"':
            yield from self._string()
            return
        text = ""
        while len(text) < _MAX_NUMBER and _SCALAR_BEGUN.fullmatch(text + char):
            text += char
            char = yield from self._next()
        if not _SCALAR.fullmatch(text):
            raise Unexpected
        self._at -= 1

    def _string(self, allowed: Collection[str] | None = None) -> Waiting[str]:
        """Reads a string behind its opening quote, and returns what it says.

        Raises Unexpected as soon as it can be none of `allowed`.
        """
        read: list[str] = []
        escape = ""
        while (char := (yield from self._next())) != '"' or escape:
            if escape or char == "\\":
                escape += char
                if not _ESCAPE_BEGUN.fullmatch(escape):
                    raise Unexpected
                if len(escape) == (6 if escape[1:2] == "u" else 2):
                    escape = ""
            elif char < " ":
                raise Unexpected
            elif plain := _PLAIN.match(self._text, self._at):
                char += plain[0]
                self._at = plain.end()
            read.append(char)
            if allowed is not None:
                begun = "".join(read)
                if "\\" not in begun and not any(name.startswith(begun) for name in allowed):
                    raise Unexpected
        text = str(json.loads(f'"{"".join(read)}"'))
        if allowed is not None and text not in allowed:
            raise Unexpected
        return text

    def _loose(self, char: str, quote: str) -> Waiting[None]:
        """Reads a text within `quote`, or a number or a word, from its first character."""
        text = ""
        if char != quote[0]:
            while char not in ",]}":
                text += char
                char = yield from self._next()
            self._at -= 1
            self._add_arguments(typed(text.strip(), ALL_TYPES - {"string"}))
            return
        for expected in quote[1:]:
            if (yield from self._next()) != expected:
                raise Unexpected
        self._add_arguments('"')
        while (where := text.find(quote)) < 0:
            n = len(text) - held(text, (quote,))
            self._add_text(text[:n])
            text = text[n:] + (yield from self._piece())
        self._at -= len(text) - where - len(quote)
        self._add_text(text[:where])
        self._add_arguments('"')

    def _add_text(self, text: str) -> None:
        self._add_arguments(escaped(text))


def escaped(text: str) -> str:
    """A text as JSON has it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
