"""gpt-oss's way: messages in channels. Format: https://cookbook.openai.com/articles/openai-harmony

`<|channel|>analysis<|message|>` begins reasoning, `final` the answer, `commentary` text for the
user or, with `to=functions.NAME`, a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

from dflash_local.chat.dialect import Dialect, IsToken, Parser
from dflash_local.chat.events import Content, Event, EventQueue, Reasoning
from dflash_local.chat.lark import any_of, json_rule, literal, text_rule
from dflash_local.chat.parsing.json_reader import JsonReader, State
from dflash_local.chat.parsing.marks import find, held
from dflash_local.chat.reasoning import thought_rules
from dflash_local.chat.tool import Tool

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN, _END = "<|constrain|>", "<|end|>"
_ENDS = (_END, "<|return|>", "<|call|>", _START)
# What a header may begin with; before it stands the `<|start|>assistant` of the prompt.
_HEADS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, "to=functions.")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(frozen=True)
class Harmony(Dialect):
    """Its marks are control tokens, so the names of these are needed."""

    special: bool = True
    opens_with_mark: ClassVar[bool] = True

    @classmethod
    def of(cls, template: str) -> Harmony | None:
        is_it = all(part in template for part in (_START, _CHANNEL, _MESSAGE))
        return cls() if is_it else None

    @property
    def reasoning_marks(self) -> tuple[str, str]:
        return f"{_CHANNEL}analysis{_MESSAGE}", _END

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


class _ChannelState(Enum):
    START = auto()
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class ChannelParser:
    """Marks and headers are never text; a message to an unknown tool is content."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._events = EventQueue()
        self._state = _ChannelState.START
        self._text = ""
        self._tool = ""
        self._body = _ChannelState.CONTENT
        """What the message is if it turns out to be no call."""
        self._json: JsonReader | None = None

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._advance(last=False)
        return self._events.take()

    def finish(self) -> list[Event]:
        self._advance(last=True)
        return self._events.take()

    def _advance(self, *, last: bool) -> None:
        steps = {
            _ChannelState.START: self._start,
            _ChannelState.HEADER: self._header,
            _ChannelState.CALL: self._call,
        }
        while steps.get(self._state, self._message)(last):
            pass

    def _start(self, last: bool) -> bool:
        """A header, or text without one. False: more text is needed."""
        rest = self._text.lstrip()
        if any(rest.startswith(head) for head in _HEADS):
            self._state = _ChannelState.HEADER
        elif not last and any(head.startswith(rest) for head in _HEADS):
            return False
        else:
            self._state = _ChannelState.CONTENT
        return True

    def _header(self, last: bool) -> bool:
        header, message, rest = self._text.partition(_MESSAGE)
        if not message:
            if last and not self._text.lstrip().startswith("<|"):
                self._state = _ChannelState.CONTENT
                return True
            return False
        self._text = rest
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        reasons = channel is not None and channel[1] == "analysis"
        self._state = self._body = _ChannelState.REASONING if reasons else _ChannelState.CONTENT
        tool = recipient[1].removeprefix("functions.") if recipient else None
        if tool in self._names:
            assert tool is not None
            self._state, self._tool, self._json = _ChannelState.CALL, tool, None
        return True

    def _message(self, last: bool) -> bool:
        """The next piece of a message that is no call, up to its end."""
        found = find(self._text, _ENDS)
        n = found[0] if found else len(self._text) - (0 if last else held(self._text, _ENDS))
        text, self._text = self._text[:n], self._text[n:]
        self._events.add(
            Reasoning(text) if self._state is _ChannelState.REASONING else Content(text)
        )
        if found is None:
            return False
        if found[1] != _START:
            self._text = self._text[len(found[1]) :]
        self._state = _ChannelState.START
        return True

    def _call(self, last: bool) -> bool:
        """The arguments of a call. A mark in one of their texts is part of it."""
        if self._json is None and self._text.lstrip().startswith("{"):
            self._text, self._json = self._text.lstrip(), JsonReader()
            self._events.start_call(self._tool)
        if self._json is not None and self._json.state is State.READING:
            at = self._json.read(self._text)
            self._events.add_arguments(self._text[:at])
            self._text = self._text[at:]
            if self._json.state is State.READING:
                return False
        # White space around the arguments is left out, but not around other text.
        rest = self._text.lstrip()
        if rest.startswith(_ENDS) or (last and not rest):
            self._text = rest
        elif not last and any(end.startswith(rest) for end in _ENDS):
            return False
        self._state = self._body if self._json is None else _ChannelState.CONTENT
        return True
