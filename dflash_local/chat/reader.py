"""Reads the answer to a chat while it arrives: what is content, reasoning, and calls of tools."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import Any, cast

from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.chat.parsing.parser import Parser
from dflash_local.chat.tool import Tool
from dflash_local.errors import InputError
from dflash_local.result import Chunk


class ChatReader:
    """Reads one answer with `parser`. Calls after the first `most_calls` are left out.

    `thoughts` are the parts of its reasoning so far, between which there was something else;
    `calls` are its calls, in OpenAI's form.
    """

    def __init__(self, parser: Parser, most_calls: int | None = None) -> None:
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._parser = parser
        self._most_calls = most_calls
        self._content: list[str] = []
        self._last: Event | None = None

    @property
    def content(self) -> str:
        """The text of the answer itself, so far."""
        return "".join(self._content)

    def take(self, chunk: Chunk) -> list[Event]:
        """Take in a chunk, and return what it adds to the message; no event is without text."""
        events = self._parser.feed(chunk.text, is_last=chunk.result is not None)
        return [event for event in events if self._is_kept(event)]

    def read(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The chunks of an answer with their `content` and `reasoning`, and the result with its
        `tool_calls`. Closing it closes `chunks`."""
        with closing(cast(Generator[Chunk, None, None], chunks)):
            for chunk in chunks:
                yield self._read(chunk)

    async def aread(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        """`read` for asynchronous callers."""
        async with aclosing(cast(AsyncGenerator[Chunk, None], chunks)):
            async for chunk in chunks:
                yield self._read(chunk)

    def _read(self, chunk: Chunk) -> Chunk:
        events = self.take(chunk)
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        result = chunk.result
        if result is not None:
            result = replace(
                result,
                content=self.content,
                reasoning="".join(self.thoughts) or None,
                tool_calls=self.calls,
            )
        return replace(chunk, content=content, reasoning=reasoning, result=result)

    def _is_kept(self, event: Event) -> bool:
        """Add what an event says to the message. False for a call too many."""
        match event:
            case Content(text):
                self._content.append(text)
            case Reasoning(text) if isinstance(self._last, Reasoning):
                self.thoughts[-1] += text
            case Reasoning(text):
                self.thoughts.append(text)
            case _ if self._most_calls is not None and event.index >= self._most_calls:
                return False
            case ToolCallStart():
                self.calls.append(call_of(event))
            case ToolCallArguments(index, text):
                self.calls[index]["function"]["arguments"] += text
        self._last = event
        return True


def call_of(event: ToolCallStart) -> dict[str, Any]:
    """A call without its arguments, in OpenAI's form."""
    function = {"name": event.name, "arguments": ""}
    return {"id": event.id, "type": "function", "function": function}


def called_by(choice: str, tools: Sequence[Tool]) -> list[Tool]:
    """The tools that an answer may call by a `tool_choice`. Raises InputError for a bad choice."""
    names = [tool.name for tool in tools]
    if choice not in ("auto", "none") and (choice not in ("required", *names) or not names):
        raise InputError(
            f'tool_choice is {choice!r}; give "auto", "none", "required" or the name of a tool'
            + (f": {', '.join(names)}" if names else ", and tools")
        )
    return [tool for tool in tools if choice not in names or choice == tool.name]
