"""gpt-oss's way: messages in channels. Format: https://cookbook.openai.com/articles/openai-harmony

`<|channel|>analysis<|message|>` begins reasoning, `final` the answer, `commentary` text for the
user or, with `to=functions.NAME`, a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import Content, Reasoning
from dflash_local.chat.form import Marks
from dflash_local.chat.lark import IsToken, any_of, json_rule, literal, text_rule, thought_rules
from dflash_local.chat.parsing.json_reader import JsonReader, State
from dflash_local.chat.parsing.marks import find, held
from dflash_local.chat.parsing.parser import Parser, Waiting
from dflash_local.chat.tool import Tool

MARKS = _START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN, _END = "<|constrain|>", "<|end|>"
_ENDS = (_END, "<|return|>", "<|call|>", _START)
# What a header may begin with; before it stands the `<|start|>assistant` of the prompt.
_HEADS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, "to=functions.")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(frozen=True)
class Harmony(Dialect):
    """Its marks are control tokens, so the names of these are needed."""

    thinking: Marks | None = (f"{_CHANNEL}analysis{_MESSAGE}", _END)
    special: bool = True
    opens_with_mark: ClassVar[bool] = True

    @property
    def has_calls(self) -> bool:
        return True

    def without_reasoning(self) -> Dialect:
        return self

    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        return ChannelParser({tool.name for tool in tools})

    def call_grammar(
        self, tools: Sequence[Tool], *, parallel: bool, is_token: IsToken, thinking_open: bool
    ) -> str:
        """One call: a call ends the answer."""
        channel, message = text_rule(_CHANNEL, is_token), text_rule(_MESSAGE, is_token)
        constrain = text_rule(_CONSTRAIN, is_token)
        rules = [
            f"start: reasoning? ({any_of([f'call{i}' for i in range(len(tools))])})",
            _reasoning_rules(is_token),
        ]
        for i, tool in enumerate(tools):
            to = literal(f"commentary to=functions.{tool.name} ")
            rules.append(f'call{i}: {channel} {to} {constrain} "json" {message} args{i}')
            rules.append(json_rule(f"args{i}", tool.parameters))
        return "\n".join(rules)

    def answer_grammar(
        self, schema: Mapping[str, Any], *, is_token: IsToken, thinking_open: bool
    ) -> str:
        channel, message = text_rule(_CHANNEL, is_token), text_rule(_MESSAGE, is_token)
        rules = [
            f'start: reasoning? {channel} "final" {message} answer',
            _reasoning_rules(is_token),
            json_rule("answer", schema, lenient=False),
        ]
        return "\n".join(rules)


def _reasoning_rules(is_token: IsToken) -> str:
    """Lark rules `reasoning`, with the beginning of the next message, and what it needs."""
    start, channel, message = (text_rule(name, is_token) for name in (_START, _CHANNEL, _MESSAGE))
    rule = f'reasoning: {channel} "analysis" {message} thought {start} "assistant"'
    return f"{rule}\n{thought_rules(_END, is_token)}"


class ChannelParser(Parser):
    """Marks and headers are never text; a message to an unknown tool is content."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def _parse(self) -> Waiting[None]:
        while self._text or not self._last:
            kind, tool = yield from self._header()
            if tool and (yield from self._call(tool)):
                kind = Content
            yield from self._message(kind)

    def _header(self) -> Waiting[tuple[type[Content] | type[Reasoning], str]]:
        """Reads a header, if there is one: what the message is, and the tool that it calls."""
        if not (yield from self._mark(_HEADS)):
            return Content, ""
        while _MESSAGE not in self._text:
            if self._last:
                if self._text.lstrip().startswith("<|"):
                    self._text = ""
                return Content, ""
            yield
        header, _, self._text = self._text.partition(_MESSAGE)
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        tool = recipient[1].removeprefix("functions.") if recipient else ""
        reasons = channel is not None and channel[1] == "analysis"
        return Reasoning if reasons else Content, tool if tool in self._names else ""

    def _message(self, kind: type[Content] | type[Reasoning]) -> Waiting[None]:
        """Reads a message that is no call, up to its end."""
        while (found := find(self._text, _ENDS)) is None and not self._last:
            n = len(self._text) - held(self._text, _ENDS)
            self._events.append(kind(self._text[:n]))
            self._text = self._text[n:]
            yield
        n, mark = found or (len(self._text), "")
        self._events.append(kind(self._text[:n]))
        self._text = self._text[n:].removeprefix("" if mark == _START else mark)

    def _call(self, tool: str) -> Waiting[bool]:
        """Reads the arguments of a call, if there are any. A mark in one of their texts is part of
        it. White space around them is left out, but not around other text."""
        called = (yield from self._mark(("{", *_ENDS))) == "{"
        if called:
            self._text, reader = self._text.lstrip(), JsonReader()
            self._start_call(tool)
            while True:
                at = reader.read(self._text)
                self._add_arguments(self._text[:at])
                self._text = self._text[at:]
                if reader.state is not State.READING or self._last:
                    break
                yield
        if (yield from self._mark(_ENDS)) or not self._text.strip():
            self._text = self._text.lstrip()
        return called
