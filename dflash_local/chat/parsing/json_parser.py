"""Finds where a JSON value (RFC 8259) in an answer ends, or goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from dflash_local.chat.parsing.marks import held
from dflash_local.chat.parsing.parser import Parser, Waiting
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
        self._is_json = False
        """Whether what is read is JSON of the arguments."""

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

    def _until(self, end: str) -> Waiting[str]:
        """What comes before `end`, on one line."""
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
            if close == "}":
                yield from self._key(quote)
            yield from self._value((yield from self._solid()), quote, depth + 1)
            char = yield from self._solid()
            if char not in (close, ","):
                raise Unexpected
            if quote and char == ",":
                self._add_arguments(", ")
        if quote:
            self._add_arguments(close)

    def _key(self, quote: str) -> Waiting[None]:
        if quote:
            key = yield from self._until(":")
            self._add_arguments(f'"{escaped(key.strip())}": ')
            return
        yield from self._expect('"')
        yield from self._string()
        yield from self._expect(":")

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
            self._add_arguments(escaped(text[:n]))
            text = text[n:] + (yield from self._piece())
        self._at -= len(text) - where - len(quote)
        self._add_arguments(escaped(text[:where]) + '"')


def escaped(text: str) -> str:
    """A text as JSON has it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
