"""Reads the answer to a chat while it arrives: what is content, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dflash_local.chat.dialect import Dialect, IsToken, Parser
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError
from dflash_local.result import Chunk


@dataclass
class ChatReader:
    """Gives the chunks of an answer with their `content` and `reasoning`, and the result with its
    `tool_calls`."""

    parser: Parser
    _content: str = ""
    _reasoning: str = ""
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def read(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """`chunks` with what was found in them. Closing it closes them."""
        with closing(cast(Generator[Chunk, None, None], chunks)):
            for chunk in chunks:
                yield self._read(chunk)

    async def aread(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        """`read` for asynchronous callers."""
        async with aclosing(cast(AsyncGenerator[Chunk, None], chunks)):
            async for chunk in chunks:
                yield self._read(chunk)

    def _read(self, chunk: Chunk) -> Chunk:
        events = self.parser.feed(chunk.text)
        result = chunk.result
        if result is not None:
            events = events + self.parser.finish()
        before = len(self._content), len(self._reasoning)
        for event in events:
            self._take(event)
        if result is not None:
            result = replace(
                result,
                content=self._content,
                reasoning=self._reasoning or None,
                tool_calls=self._calls,
            )
        content, reasoning = self._content[before[0] :], self._reasoning[before[1] :]
        return replace(chunk, content=content, reasoning=reasoning, result=result)

    def _take(self, event: Event) -> None:
        match event:
            case Content(text):
                self._content += text
            case Reasoning(text):
                self._reasoning += text
            case ToolCallStart(_, id, name):
                function = {"name": name, "arguments": ""}
                self._calls.append({"id": id, "type": "function", "function": function})
            case ToolCallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text


def forced_call(
    dialect: Dialect,
    tools: Sequence[Tool],
    choice: str,
    *,
    is_token: IsToken,
    thinking_open: bool,
) -> str | None:
    """A Lark grammar for a `choice` of "required" or the name of a tool; None for "auto".

    Raises InputError for another choice, and where the model has no tool calls.
    """
    if choice == "auto":
        return None
    names = [tool.name for tool in tools]
    if choice not in ("required", *names) or not names:
        raise InputError(
            f'tool_choice is {choice!r}; give "auto", "none", "required" or the name of a tool'
            + (f": {', '.join(names)}" if names else ", and tools")
        )
    called = [tool for tool in tools if choice in ("required", tool.name)]
    grammar = dialect.call_grammar(
        called, parallel=True, is_token=is_token, thinking_open=thinking_open
    )
    if grammar is None:
        raise InputError(
            "this model's chat template has no tool calls, so none can be asked for; leave "
            "tool_choice out, or take another model"
        )
    return grammar
