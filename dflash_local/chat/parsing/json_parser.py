"""Finds where a JSON value (RFC 8259) in an answer ends, or goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from dflash_local.chat.parsing.parser import Parser, Waiting

_BLANKS = " \t\n\r"
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


class Unexpected(Exception):
    """A character that is not allowed where it stands."""


class Ended(Unexpected):
    """The end of the answer, where it is not allowed."""


class JsonParser(Parser):
    """Reads JSON as arguments of a call, which are told as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._at = 0
        """How far `_text` was read. As long as it is not certain that this is a call, all of it may
        become content again."""
        self._is_certain = False
        self._told: int | None = None
        """How much of `_text` is told, while arguments in JSON are read."""

    def _tried(self, reading: Waiting[None]) -> Waiting[bool]:
        """Whether what is read comes to its end. Else `_text` begins behind it with what is not
        allowed, if it was certain."""
        try:
            yield from reading
            return True
        except Ended:
            return False
        except Unexpected:
            self._at -= 1
            return False
        finally:
            self._tell()
            self._told = None

    def _json(self) -> Waiting[None]:
        """Reads a JSON object behind its `{`."""
        self._told = self._at - 1
        yield from self._value("{")
        self._tell()
        self._told = None

    def _tell(self) -> None:
        """Add what was read to the arguments, if it is such, and keep no text that is certain."""
        if self._told is not None:
            self._add_arguments(self._text[self._told : self._at])
            self._told = 0 if self._is_certain else self._at
        if self._is_certain:
            self._text, self._at = self._text[self._at :], 0

    def _next(self) -> Waiting[str]:
        """The next character. With `_at` one less it comes again."""
        while self._at == len(self._text):
            if self._last:
                raise Ended
            self._tell()
            yield
        self._at += 1
        return self._text[self._at - 1]

    def _piece(self) -> Waiting[str]:
        """All that has come, at least one character. What is too much of it is given back by
        `_at`."""
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

    def _value(self, char: str, depth: int = 0) -> Waiting[None]:
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
        char = yield from self._solid()
        if char == close:
            return
        self._at -= 1
        while char != close:
            if close == "}":
                yield from self._expect('"')
                yield from self._string()
                yield from self._expect(":")
            yield from self._value((yield from self._solid()), depth + 1)
            char = yield from self._solid()
            if char not in (close, ","):
                raise Unexpected

    def _string(self, allowed: Collection[str] | None = None) -> Waiting[str]:
        """Reads a string behind its opening quote, and returns what it says.

        Raises Unexpected as soon as it can be none of `allowed`.
        """
        read: list[str] = []
        is_plain = True
        while (char := (yield from self._next())) != '"':
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

    def _escaped(self) -> Waiting[str]:
        """Reads what follows a backslash."""
        char = yield from self._next()
        if char != "u":
            if char not in _ESCAPES:
                raise Unexpected
            return char
        for _ in range(4):
            digit = yield from self._next()
            if digit not in _HEX:
                raise Unexpected
            char += digit
        return char

    def _scalar(self, char: str) -> Waiting[None]:
        """Reads a number or a word from its first character. It ends before the one behind it."""
        text = ""
        while len(text) < _MAX_NUMBER and _SCALAR_BEGUN.fullmatch(text + char):
            text += char
            char = yield from self._next()
        if not _SCALAR.fullmatch(text):
            raise Unexpected
        self._at -= 1
