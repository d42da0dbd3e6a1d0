"""Finds where a JSON value (RFC 8259) ends, or goes wrong, in text that arrives piece by piece.

The grammar is written as coroutines. Each is sent the characters of its part, one after the other,
and returns at the end of the part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from enum import Enum, auto
from typing import TypeVar

_T = TypeVar("_T")
Steps = Generator[None, str, _T]

BLANKS = " \t\n\r"
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_BEGUN = re.compile(
    r"t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?"
)
# Python's own parser refuses numbers of thousands of digits and very deep nesting.
_MAX_NUMBER = 400
MAX_DEPTH = 200


class State(Enum):
    READING = auto()
    DONE = auto()
    BROKEN = auto()


class Unexpected(Exception):
    """A character that is not allowed where it stands."""


class JsonReader:
    """Reads one value. `state` says how far it came."""

    def __init__(self) -> None:
        self.state = State.READING
        self._back = ""
        """A character that was read, and belongs to what comes next."""
        self._steps = self._read()
        next(self._steps)

    def read(self, text: str, at: int = 0) -> int:
        """Read `text` from `at` on, and return the place where reading stopped.

        While READING this is the end of `text`. Once DONE it is the place behind the value, once
        BROKEN the first character that is not allowed where it stands.
        """
        while at < len(text) and self.state is State.READING:
            try:
                self._steps.send(text[at])
            except StopIteration:
                self.state = State.DONE
                return at if self._back else at + 1
            except Unexpected:
                self.state = State.BROKEN
                return at
            self._has_read(text[at])
            at += 1
        return at

    def _has_read(self, char: str) -> None:
        """A character is allowed where it stands, and more are to come."""

    def _read(self) -> Steps[None]:
        yield from self._value((yield from self._mark()))

    def _next(self) -> Steps[str]:
        char, self._back = self._back, ""
        return char or (yield)

    def _mark(self) -> Steps[str]:
        """The next character that is not blank."""
        while (char := (yield from self._next())) in BLANKS:
            pass
        return char

    def _expect(self, expected: str) -> Steps[None]:
        """Raises Unexpected unless this is the next mark."""
        if (yield from self._mark()) != expected:
            raise Unexpected

    def _value(self, char: str, depth: int = 0) -> Steps[None]:
        """Reads a value that begins with `char`."""
        if char == '"':
            yield from self._string()
            return
        if char not in "{[":
            yield from self._scalar(char)
            return
        if depth == MAX_DEPTH:
            raise Unexpected
        close = "}" if char == "{" else "]"
        char = yield from self._mark()
        if char == close:
            return
        self._back = char
        while char != close:
            if close == "}":
                yield from self._expect('"')
                yield from self._string()
                yield from self._expect(":")
            yield from self._value((yield from self._mark()), depth + 1)
            char = yield from self._mark()
            if char not in (close, ","):
                raise Unexpected

    def _string(self, allowed: Collection[str] | None = None) -> Steps[str]:
        """Reads a string behind its opening quote, and returns what it says.

        Raises Unexpected as soon as it can be none of `allowed`.
        """
        read: list[str] = []
        is_plain = True
        while (char := (yield)) != '"':
            if char < " ":
                raise Unexpected
            read.append(char)
            if char == "\\":
                read.append((yield from self._escaped()))
                is_plain = False
            if allowed is not None and is_plain:
                begun = "".join(read)
                if not any(name.startswith(begun) for name in allowed):
                    raise Unexpected
        text = str(json.loads(f'"{"".join(read)}"'))
        if allowed is not None and text not in allowed:
            raise Unexpected
        return text

    def _escaped(self) -> Steps[str]:
        """Reads what follows a backslash."""
        char = yield
        if char != "u":
            if char not in _ESCAPES:
                raise Unexpected
            return char
        for _ in range(4):
            digit = yield
            if digit not in _HEX:
                raise Unexpected
            char += digit
        return char

    def _scalar(self, char: str) -> Steps[None]:
        """Reads a number or a word from its first character. It ends before the one behind it."""
        text = ""
        while len(text) < _MAX_NUMBER and _SCALAR_BEGUN.fullmatch(text + char):
            text += char
            char = yield
        if not _SCALAR.fullmatch(text):
            raise Unexpected
        self._back = char
