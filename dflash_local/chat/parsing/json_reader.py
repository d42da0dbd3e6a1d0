"""Finds where a JSON value (RFC 8259) ends, or goes wrong, in text that arrives piece by piece."""

from __future__ import annotations

import re
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BLANK = re.compile(r"[ \t\n\r]*")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?"
)
# Python's own parser refuses numbers of thousands of digits and very deep nesting.
_MAX_NUMBER = 400
_MAX_DEPTH = 200


class State(Enum):
    READING = auto()
    DONE = auto()
    BROKEN = auto()


class _Next(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    SCALAR = auto()


class JsonReader:
    """Reads one value. `state` says how far it came."""

    def __init__(self) -> None:
        self.state = State.READING
        self._next = _Next.VALUE
        self._open: list[str] = []
        self._scalar = ""
        self._is_key = False
        self._hex_left = 0

    def read(self, text: str, at: int = 0) -> int:
        """Read `text` from `at` on, and return the place where reading stopped.

        While READING this is the end of `text`. Once DONE it is the place behind the value, once
        BROKEN the first character that is not allowed where it stands.
        """
        while at < len(text) and self.state is State.READING:
            if self._next is _Next.STRING:
                at = self._string(text, at)
            elif self._next is _Next.ESCAPE:
                at = self._escape(text[at], at)
            elif self._next is _Next.SCALAR:
                at = self._in_scalar(text[at], at)
            else:
                at = _end(_BLANK, text, at)
                if at < len(text):
                    at = self._mark(text[at], at)
        return at

    def _mark(self, mark: str, at: int) -> int:
        kind = self._next
        if kind in (_Next.VALUE, _Next.VALUE_OR_END):
            if mark == "]" and kind is _Next.VALUE_OR_END:
                return self._close(at)
            return self._value(mark, at)
        if kind in (_Next.KEY, _Next.KEY_OR_END):
            if mark == '"':
                self._next, self._is_key = _Next.STRING, True
                return at + 1
            if mark == "}" and kind is _Next.KEY_OR_END:
                return self._close(at)
        elif kind is _Next.COLON:
            if mark == ":":
                self._next = _Next.VALUE
                return at + 1
        elif mark == ",":
            self._next = _Next.KEY if self._open[-1] == "}" else _Next.VALUE
            return at + 1
        elif mark == self._open[-1]:
            return self._close(at)
        return self._break(at)

    def _value(self, mark: str, at: int) -> int:
        if mark in "{[":
            if len(self._open) == _MAX_DEPTH:
                return self._break(at)
            self._open.append("}" if mark == "{" else "]")
            self._next = _Next.KEY_OR_END if mark == "{" else _Next.VALUE_OR_END
        elif mark == '"':
            self._next, self._is_key = _Next.STRING, False
        elif mark in "-0123456789tfn":
            self._next, self._scalar = _Next.SCALAR, mark
        else:
            return self._break(at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._next = _Next.ESCAPE
        elif text[at] != '"':
            return self._break(at)
        elif self._is_key:
            self._next = _Next.COLON
        else:
            self._ended()
        return at + 1

    def _escape(self, mark: str, at: int) -> int:
        if self._hex_left:
            if mark not in _HEX:
                return self._break(at)
            self._hex_left -= 1
        elif mark == "u":
            self._hex_left = 4
        elif mark not in _ESCAPES:
            return self._break(at)
        if not self._hex_left:
            self._next = _Next.STRING
        return at + 1

    def _in_scalar(self, mark: str, at: int) -> int:
        longer = self._scalar + mark
        if _begins_scalar(longer):
            self._scalar = longer
            return at + 1
        if self._scalar not in _LITERALS and not _NUMBER.fullmatch(self._scalar):
            return self._break(at)
        self._ended()
        return at

    def _close(self, at: int) -> int:
        self._open.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        self._next = _Next.COMMA_OR_END
        if not self._open:
            self.state = State.DONE

    def _break(self, at: int) -> int:
        self.state = State.BROKEN
        return at


def _begins_scalar(text: str) -> bool:
    if text[0] in "tfn":
        return any(literal.startswith(text) for literal in _LITERALS)
    return len(text) <= _MAX_NUMBER and _NUMBER_BEGUN.fullmatch(text) is not None


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
