"""Llama 3.1's way: an answer that is a call and nothing else, in JSON or as `tool.call(...)`.

Formats: the chat templates of Llama 3.1 to 3.3, and "Model response format" in
https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dflash_local.chat.call_reader import CallReader, ObjectCall
from dflash_local.chat.dialect import IsToken, Parser
from dflash_local.chat.events import (
    Content,
    Event,
    NewId,
    ToolCallArguments,
    ToolCallStart,
    call_id,
    joined,
)
from dflash_local.chat.json_reader import State
from dflash_local.chat.lark import object_calls
from dflash_local.chat.python_call import PythonCall
from dflash_local.chat.thinking import Answer
from dflash_local.chat.tool import Tool, chosen

TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;"


@dataclass(frozen=True)
class Llama31:
    """The tag before calls is a control token, so the names of these are needed."""

    name: str = "llama3.1"
    special: bool = True
    stop: tuple[str, ...] = ()

    def parser(
        self, tools: Sequence[Tool], *, thinking_open: bool = False, new_id: NewId = call_id
    ) -> Parser:
        return BareCalls({tool.name for tool in tools}, new_id) if tools else Answer()

    def call_grammar(
        self,
        tools: Sequence[Tool],
        *,
        choice: str,
        parallel: bool,
        is_token: IsToken,
        thinking_open: bool = False,
    ) -> str:
        """One call: the family makes no more in an answer."""
        return f"start: object\n{object_calls(chosen(tools, choice), arguments='parameters')}"

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool = False
    ) -> None:
        return None


class _In(Enum):
    START = auto()
    CALL = auto()
    CONTENT = auto()


class BareCalls:
    """A parser of answers that are calls, parted by `;` or white space, from the first character.

    What follows a call and is none is content.
    """

    def __init__(self, names: set[str], new_id: NewId) -> None:
        self._names = names
        self._new_id = new_id
        self._in = _In.START
        self._text = ""
        """From the beginning of what may become a call on, as long as it is not certain."""
        self._at = 0
        self._reader: CallReader | None = None
        self._announced = False
        self._n_calls = 0
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        behind_call = self._in is _In.START and self._n_calls > 0
        if not self._announced and (not behind_call or self._text.strip(_SEPARATORS)):
            self._events.append(Content(self._text))
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _advance(self) -> None:
        while self._in is not _In.CONTENT:
            if not (self._start() if self._in is _In.START else self._call()):
                return
        self._events.append(Content(self._text))
        self._text = ""

    def _start(self) -> bool:
        """Whether a call begins. False: more text is needed."""
        rest = self._text.lstrip(_SEPARATORS if self._n_calls else None)
        tagged = rest.startswith(TAG)
        if not tagged and TAG.startswith(rest):
            return False
        call = rest[len(TAG) :].lstrip() if tagged else rest
        if not call:
            return False
        self._announced, self._at = False, len(self._text) - len(call)
        if call[0] == "{":
            others = ("type", "id")
            self._reader = ObjectCall(
                self._names, arguments=("parameters", "arguments"), others=others, bare=True
            )
            self._in = _In.CALL
        elif tagged:
            self._reader, self._in = PythonCall(self._names), _In.CALL
        else:
            self._in = _In.CONTENT
        return True

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._at = reader.read(self._text, self._at)
        if reader.name is not None:
            self._announce(reader.name, reader.take())
        if reader.state is State.READING:
            return False
        self._in = _In.START if reader.state is State.DONE else _In.CONTENT
        if self._in is _In.START:
            self._announced = False
        return True

    def _announce(self, name: str, arguments: str) -> None:
        if not self._announced:
            self._announced = True
            self._events.append(ToolCallStart(self._n_calls, self._new_id(), name))
            self._n_calls += 1
        self._events.append(ToolCallArguments(self._n_calls - 1, arguments))
        self._text, self._at = self._text[self._at :], 0
