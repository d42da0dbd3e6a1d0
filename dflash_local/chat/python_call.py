"""Reads one call in Python's syntax, `name.call(key=value)`: Llama 3.1's built-in tools."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from dflash_local.chat.json_reader import State

_CALL = ".call("
# Python's compiler may take its time over more, and built-in tools take a line.
_MAX_LENGTH = 2048


class PythonCall:
    """The arguments come whole: only a complete call tells what they are."""

    def __init__(self, names: Collection[str]) -> None:
        self.state = State.READING
        self._heads = {f"{name}{_CALL}": name for name in names}
        self._text = ""
        self._name: str | None = None
        self._arguments = ""

    @property
    def name(self) -> str | None:
        return self._name

    def take(self) -> str:
        text, self._arguments = self._arguments, ""
        return text

    def read(self, text: str, at: int = 0) -> int:
        while at < len(text) and self.state is State.READING:
            self._text += text[at]
            if not self._may_be_call():
                self.state = State.BROKEN
                break
            at += 1
            if text[at - 1] == ")":
                self._end()
        return at

    def _may_be_call(self) -> bool:
        begun = self._text
        if len(begun) > _MAX_LENGTH:
            return False
        return any(head.startswith(begun) or begun.startswith(head) for head in self._heads)

    def _end(self) -> None:
        """A closing bracket is the end if what is there by then is a call with plain values."""
        for head, name in self._heads.items():
            if self._text.startswith(head):
                arguments = _arguments(self._text[len(head) :])
                if arguments is not None:
                    self._name, self._arguments = name, arguments
                    self.state = State.DONE


def _arguments(text: str) -> str | None:
    """`key=value, ...)` as a JSON object."""
    try:
        call = ast.parse(f"_({text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if None in values:
            return None
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
