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
_MAX_DEPTH = 200


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
        self._steps = self._read()
        next(self._steps)

    def read(self, text: str, at: int = 0) -> int:
        """Read `text` from `at` on, and return the place where reading stopped.

        While READING this is the end of `text`. Once DONE it is the place behind the value, once
        BROKEN the first character that is not allowed where it stands.
        """
        while at < len(text) and self.state is State.READING:
            try:
                self._take(text[at])
            except StopIteration as end:
                self.state = State.DONE
                return at if end.value else at + 1
            except Unexpected:
                self.state = State.BROKEN
                return at
            at += 1
        return at

    def _take(self, char: str) -> None:
        self._steps.send(char)

    def _read(self) -> Steps[str | None]:
        return (yield from value((yield from mark())))


def expect(char: str, expected: str) -> None:
    """Raises Unexpected for another character."""
    if char != expected:
        raise Unexpected


def mark() -> Steps[str]:
    """The next character that is not blank."""
    char = yield
    while char in BLANKS:
        char = yield
    return char


def value(char: str, depth: int = 0) -> Steps[str | None]:
    """Reads a value that begins with `char`.

    Returns None, or the character behind the value: numbers and words only end there.
    """
    if char == '"':
        yield from string()
        return None
    if char not in "{[":
        return (yield from _scalar(char))
    if depth == _MAX_DEPTH:
        raise Unexpected
    close = "}" if char == "{" else "]"
    char = yield from mark()
    if char == close:
        return None
    while True:
        if close == "}":
            expect(char, '"')
            yield from string()
            expect((yield from mark()), ":")
            char = yield from mark()
        char = yield from behind((yield from value(char, depth + 1)))
        if char == close:
            return None
        expect(char, ",")
        char = yield from mark()


def behind(char: str | None) -> Steps[str]:
    """The mark behind a value, for which `value` has returned `char`."""
    return (yield from mark()) if char is None or char in BLANKS else char


def string(allowed: Collection[str] | None = None) -> Steps[str]:
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
            read.append((yield from _escaped()))
            is_plain = False
        if allowed is not None and is_plain:
            begun = "".join(read)
            if not any(name.startswith(begun) for name in allowed):
                raise Unexpected
    text = str(json.loads(f'"{"".join(read)}"'))
    if allowed is not None and text not in allowed:
        raise Unexpected
    return text


def _escaped() -> Steps[str]:
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


def _scalar(char: str) -> Steps[str]:
    """Reads a number or a word from its first character, and returns the one behind it."""
    text = ""
    while len(text) < _MAX_NUMBER and _SCALAR_BEGUN.fullmatch(text + char):
        text += char
        char = yield
    if not _SCALAR.fullmatch(text):
        raise Unexpected
    return char
