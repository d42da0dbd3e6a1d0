"""Reads one tool call from text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from dflash_local.chat.parsing.json_reader import (
    JsonReader,
    State,
    Steps,
    Unexpected,
    behind,
    expect,
    mark,
    string,
    value,
)


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


class ObjectCallReader(JsonReader):
    """Reads a call that is a JSON object: `{"name": ..., "arguments": {...}}`, keys in any order.

    `names` are the tools that may be called, `arguments` the keys that their arguments may have.
    `others` are further keys that the object may have before it is certain that it is a call, None
    for any. A `bare` call has no mark around it, so an object without arguments is not taken for
    one.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        arguments: Collection[str] = ("arguments",),
        others: Collection[str] | None = None,
        bare: bool = False,
    ) -> None:
        self._names = names
        self._argument_keys = arguments
        self._keys = None if others is None else ("name", *arguments, *others)
        self._bare = bare
        self._name: str | None = None
        self._has_arguments = False
        self._in_arguments = False
        self._arguments: list[str] = []
        super().__init__()

    @property
    def name(self) -> str | None:
        return self._name if self._has_arguments else None

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _take(self, char: str) -> None:
        was_in_arguments = self._in_arguments
        super()._take(char)
        if was_in_arguments or self._in_arguments:
            self._arguments.append(char)

    def _read(self) -> Steps[str | None]:
        seen = set()
        expect((yield from mark()), "{")
        char = ","
        while char == ",":
            expect((yield from mark()), '"')
            key = yield from string(self._keys if self.name is None else None)
            kind = "arguments" if key in self._argument_keys else key
            if kind in seen:
                raise Unexpected
            seen.add(kind)
            expect((yield from mark()), ":")
            char = yield from behind((yield from self._field(kind, (yield from mark()))))
        expect(char, "}")
        if self._name is None or (self._bare and not self._has_arguments):
            raise Unexpected
        if not self._has_arguments:
            self._has_arguments = True
            self._arguments.append("{}")
        return None

    def _field(self, key: str, char: str) -> Steps[str | None]:
        """Reads the value of a key from its first character; returns what `value` does."""
        if key == "name":
            expect(char, '"')
            self._name = yield from string(self._names)
            return None
        if key != "arguments":
            return (yield from value(char))
        expect(char, "{")
        self._has_arguments = self._in_arguments = True
        yield from value(char)
        self._in_arguments = False
        return None
