"""Reads one tool call from text that arrives piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from dflash_local.chat.parsing.json_reader import JsonReader, State

_BLANK = " \t\n\r"
_STRING_BEGUN = re.compile(r'"([^"\\]*)')


class CallReader(Protocol):
    """Reads one call. `read` and `state` are those of `JsonReader`, for the whole call."""

    @property
    def state(self) -> State: ...

    @property
    def name(self) -> str | None:
        """The tool that is called, as soon as it is certain that this is a call."""
        ...

    def read(self, text: str, at: int = 0) -> int: ...

    def take(self) -> str:
        """The JSON text of the arguments, as far as it was read and not taken before."""
        ...


class _ObjectPlace(Enum):
    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA_OR_END = auto()


class ObjectCallReader:
    """Reads a call that is a JSON object: `{"name": ..., "arguments": {...}}`, keys in any order.

    `names` are the tools that may be called, `arguments` the keys that their arguments may have.
    `others` are further keys that the object may have, None for any. A `bare` call has no mark
    around it, so an object without arguments is not taken for one.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        arguments: Collection[str] = ("arguments",),
        others: Collection[str] | None = None,
        bare: bool = False,
    ) -> None:
        self.state = State.READING
        self._names = names
        self._argument_keys = arguments
        self._others = others
        self._bare = bare
        self._at = _ObjectPlace.START
        self._part = JsonReader()
        self._text = ""
        self._key = ""
        self._seen: set[str] = set()
        self._name: str | None = None
        self._has_arguments = False
        self._arguments: list[str] = []

    @property
    def name(self) -> str | None:
        return self._name if self._has_arguments else None

    def take(self) -> str:
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def read(self, text: str, at: int = 0) -> int:
        while at < len(text) and self.state is State.READING:
            if self._at in (_ObjectPlace.IN_KEY, _ObjectPlace.IN_VALUE):
                at = self._read_part(text, at)
            elif text[at] in _BLANK:
                at += 1
            else:
                at = self._mark(text[at], at)
        return at

    def _mark(self, mark: str, at: int) -> int:
        """Take one of the characters that begin, separate or end the parts of the object."""
        if self._at is _ObjectPlace.VALUE:
            return self._begin_value(mark, at)
        if mark == "{" and self._at is _ObjectPlace.START:
            self._at = _ObjectPlace.KEY_OR_END
        elif mark == '"' and self._at in (_ObjectPlace.KEY_OR_END, _ObjectPlace.KEY):
            self._at, self._part, self._text = _ObjectPlace.IN_KEY, JsonReader(), ""
            return at
        elif mark == ":" and self._at is _ObjectPlace.COLON:
            self._at = _ObjectPlace.VALUE
        elif mark == "," and self._at is _ObjectPlace.COMMA_OR_END:
            self._at = _ObjectPlace.KEY
        elif mark == "}" and self._at in (_ObjectPlace.KEY_OR_END, _ObjectPlace.COMMA_OR_END):
            return self._end(at)
        else:
            return self._break(at)
        return at + 1

    def _begin_value(self, mark: str, at: int) -> int:
        if self._key in self._argument_keys:
            if mark != "{":
                return self._break(at)
            self._has_arguments = True
        elif self._key == "name" and mark != '"':
            return self._break(at)
        self._at, self._part, self._text = _ObjectPlace.IN_VALUE, JsonReader(), ""
        return at

    def _read_part(self, text: str, at: int) -> int:
        end = self._part.read(text, at)
        piece = text[at:end]
        in_value = self._at is _ObjectPlace.IN_VALUE
        if in_value and self._key in self._argument_keys:
            self._arguments.append(piece)
        elif not in_value or self._key == "name":
            self._text += piece
        if self._part.state is State.BROKEN:
            return self._break(end)
        if self._part.state is State.READING:
            return end if self._may_become_known() else self._break(end)
        known = self._end_value() if in_value else self._end_key()
        return end if known else self._break(end)

    def _may_become_known(self) -> bool:
        """Whether the name or the key that has begun can still become one that is allowed."""
        begun = _STRING_BEGUN.fullmatch(self._text)
        if begun is None:
            return True
        if self._at is _ObjectPlace.IN_VALUE:
            return self._key != "name" or _begins_any(begun[1], self._names)
        if self._others is None:
            return True
        return _begins_any(begun[1], ("name", *self._argument_keys, *self._others))

    def _end_key(self) -> bool:
        self._key = json.loads(self._text)
        kind = "arguments" if self._key in self._argument_keys else self._key
        known = kind in ("name", "arguments") or self._others is None or kind in self._others
        if not known or kind in self._seen:
            return False
        self._seen.add(kind)
        self._at = _ObjectPlace.COLON
        return True

    def _end_value(self) -> bool:
        self._at = _ObjectPlace.COMMA_OR_END
        if self._key != "name":
            return True
        name = json.loads(self._text)
        if name not in self._names:
            return False
        self._name = name
        return True

    def _end(self, at: int) -> int:
        if self._name is None or (self._bare and not self._has_arguments):
            return self._break(at)
        if not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")
        self.state = State.DONE
        return at + 1

    def _break(self, at: int) -> int:
        self.state = State.BROKEN
        return at


def _begins_any(text: str, names: Collection[str]) -> bool:
    return any(name.startswith(text) for name in names)
