"""Llama 3.1's way: an answer that is a call and nothing else, in JSON or as `tool.call(...)`.

Formats: the chat templates of Llama 3.1 to 3.3, and "Model response format" in
https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from dflash_local.chat.dialect import Dialect, IsToken, Parser
from dflash_local.chat.dialects.plain import ContentParser
from dflash_local.chat.events import Content, Event, EventQueue
from dflash_local.chat.lark import object_calls
from dflash_local.chat.parsing.call_reader import CallReader, ObjectCallReader
from dflash_local.chat.parsing.json_reader import State
from dflash_local.chat.tool import Tool

_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;"
_PYTHON_CALL = ".call("
# A built-in tool's call takes a line; Python's compiler could take long over a longer text.
_MAX_PYTHON = 2048


@dataclass(frozen=True)
class Llama31(Dialect):
    """The tag before calls is a control token, so the names of these are needed."""

    name: ClassVar[str] = "llama3.1"
    special: ClassVar[bool] = True
    calls_are_json: ClassVar[bool] = True

    @classmethod
    def of(cls, template: str) -> Llama31 | None:
        is_it = "<|start_header_id|>" in template and '"parameters"' in template.replace("\\", "")
        return cls() if is_it else None

    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        return BareCallParser({tool.name for tool in tools}) if tools else ContentParser()

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, is_token: IsToken, thinking_open: bool
    ) -> str:
        """One call: the family makes no more in an answer."""
        return f"start: object\n{object_calls(tools, arguments='parameters')}"

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool
    ) -> None:
        return None


class _BareState(Enum):
    START = auto()
    CALL = auto()
    CONTENT = auto()


class BareCallParser:
    """Parses answers that are calls from the first character, separated by `;` or white space.

    What follows a call and is none is content.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._events = EventQueue()
        self._state = _BareState.START
        self._text = ""
        """All text from the place where a call may have begun, as long as that is not certain."""
        self._at = 0
        self._reader: CallReader | None = None
        self._is_certain = False

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._advance()
        return self._events.take()

    def finish(self) -> list[Event]:
        behind_call = self._state is _BareState.START and self._events.n_calls > 0
        if not self._is_certain and (not behind_call or self._text.strip(_SEPARATORS)):
            self._events.add(Content(self._text))
        return self._events.take()

    def _advance(self) -> None:
        while self._state is not _BareState.CONTENT:
            if not (self._start() if self._state is _BareState.START else self._call()):
                return
        self._events.add(Content(self._text))
        self._text = ""

    def _start(self) -> bool:
        """Find out whether a call begins. False: more text is needed."""
        rest = self._text.lstrip(_SEPARATORS if self._events.n_calls else None)
        tagged = rest.startswith(_TAG)
        if not tagged and _TAG.startswith(rest):
            return False
        call = rest[len(_TAG) :].lstrip() if tagged else rest
        if not call:
            return False
        self._is_certain, self._at = False, len(self._text) - len(call)
        if call[0] == "{":
            others = ("type", "id")
            self._reader = ObjectCallReader(
                self._names, arguments=("parameters", "arguments"), others=others, bare=True
            )
            self._state = _BareState.CALL
        elif tagged:
            self._reader, self._state = PythonCallReader(self._names), _BareState.CALL
        else:
            self._state = _BareState.CONTENT
        return True

    def _call(self) -> bool:
        """Read on in a call. False: more text is needed."""
        reader = self._reader
        assert reader is not None
        self._at = reader.read(self._text, self._at)
        if reader.name is not None:
            if not self._is_certain:
                self._events.start_call(reader.name)
                self._is_certain = True
            self._events.add_arguments(reader.take())
            self._text, self._at = self._text[self._at :], 0
        if reader.state is State.READING:
            return False
        self._state = _BareState.START if reader.state is State.DONE else _BareState.CONTENT
        if self._state is _BareState.START:
            self._is_certain = False
        return True


class PythonCallReader:
    """Reads one call in Python's syntax, `name.call(key=value)`: Llama 3.1's built-in tools.

    The arguments come whole: only a complete call tells what they are.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.state = State.READING
        self._heads = {f"{name}{_PYTHON_CALL}": name for name in names}
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
        if len(begun) > _MAX_PYTHON:
            return False
        return any(head.startswith(begun) or begun.startswith(head) for head in self._heads)

    def _end(self) -> None:
        """A closing bracket ends the call if the text up to it is a call with plain values."""
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
