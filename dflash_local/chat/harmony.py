"""gpt-oss's way: messages in channels. Format: https://cookbook.openai.com/articles/openai-harmony

`<|channel|>analysis<|message|>` begins reasoning, `final` the answer, `commentary` text for the
user or, with `to=functions.NAME`, a call.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dflash_local.chat.dialect import Dialect
from dflash_local.chat.events import Content, Reasoning
from dflash_local.chat.form import Form, Marks
from dflash_local.chat.parsing.parser import Parser, Waiting
from dflash_local.chat.tool import Tool

MARKS = _START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END = "<|end|>"
_ENDS = (_END, "<|return|>", "<|call|>", _START)
# What a header may begin with; before it stands the `<|start|>assistant` of the prompt.
_HEADS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "to=functions.")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
# A call ends the answer.
_FORM = Form(f"{_CHANNEL}commentary to=functions.", middle=" <|constrain|>json<|message|>")


@dataclass(frozen=True)
class Harmony(Dialect):
    """Its marks are control tokens, so the names of these are needed."""

    form: Form | None = _FORM
    thinking: Marks | None = (f"{_CHANNEL}analysis{_MESSAGE}", _END)
    special: bool = True
    behind_reasoning: ClassVar[str] = f"{_START}assistant"
    before_answer: ClassVar[str] = f"{_CHANNEL}final{_MESSAGE}"

    def without_reasoning(self) -> Dialect:
        return self

    def parser(self, tools: Sequence[Tool], *, thinking_open: bool = False) -> Parser:
        return ChannelParser({tool.name for tool in tools})


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
                if self._text.startswith("<|"):
                    self._take(len(self._text))
                return Content, ""
            yield
        header = self._take(self._text.index(_MESSAGE) + len(_MESSAGE))
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        tool = recipient[1].removeprefix("functions.") if recipient else ""
        reasons = channel is not None and channel[1] == "analysis"
        return Reasoning if reasons else Content, tool if tool in self._names else ""

    def _message(self, kind: type[Content] | type[Reasoning]) -> Waiting[None]:
        """Reads a message that is no call, up to its end."""
        mark = yield from self._up_to(_ENDS, lambda n: self._events.append(kind(self._take(n))))
        self._text = self._text.removeprefix("" if mark == _START else mark)

    def _call(self, tool: str) -> Waiting[bool]:
        """Reads the arguments of a call, if there are any. A mark in one of their texts is part of
        it. White space around them is left out, but not around other text."""
        called = (yield from self._mark(("{", *_ENDS))) == "{"
        if called:
            self._start_call(tool)
            self._at, self._is_certain = 0, True
            yield from self._tried(self._json())
        if (yield from self._mark(_ENDS)) or not self._text:
            self._blank = []
        return called
