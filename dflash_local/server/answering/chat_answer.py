"""One answer to a chat while it arrives: chunks of the model in, deltas out, and the message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_local.chat.events import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    joined,
)
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.draft_detail import DraftDetail
from dflash_local.server.answering.prepared_chat import PreparedChat
from dflash_local.server.answering.token_logprobs import LogprobStream, TokenSpans, chat_logprobs


class ChatAnswer:
    """Reads one answer to a chat. Where the chat does not allow parallel calls, calls after the
    first are left out."""

    def __init__(
        self,
        model: Model,
        chat: PreparedChat,
        *,
        logprobs: bool = False,
        draft_detail: bool = False,
    ) -> None:
        self._vocabulary = model.target.vocabulary
        self._special = chat.dialect.special
        self._parser = chat.parser()
        self._most_calls = None if chat.tools.parallel else 1
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._last: Event | None = None
        self._logprobs = (
            LogprobStream(self._vocabulary, special=self._special) if logprobs else None
        )
        self._drafts = (
            DraftDetail(self._vocabulary, special=self._special) if draft_detail else None
        )
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The result, once the answer is complete."""
        if self._result is None:
            raise RuntimeError("this answer is not complete")
        return self._result

    @property
    def finish_reason(self) -> str:
        if self._calls and self.result.finish_reason == "stop":
            return "tool_calls"
        return self.result.finish_reason

    def take(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """What `chunk` adds to the message, as OpenAI's deltas."""
        if self._logprobs is not None:
            self._logprobs.push(chunk)
        if self._drafts is not None:
            self._drafts.push(chunk)
        events = self._parser.feed(chunk.text)
        if chunk.result is not None:
            self._result = chunk.result
            events = joined(events + self._parser.finish())
        for event in events:
            delta = self._delta(event)
            if delta is not None:
                self._last = event
                yield delta

    def message(self) -> dict[str, Any]:
        """The whole message."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def take_logprobs(self) -> dict[str, Any] | None:
        """Those of the tokens since the last call; None where there are none or nobody asked."""
        placed = self._logprobs.take() if self._logprobs is not None else []
        return chat_logprobs(self._vocabulary, placed) if placed else None

    def all_logprobs(self) -> dict[str, Any] | None:
        """Those of all tokens; None where nobody asked."""
        if self._logprobs is None:
            return None
        return chat_logprobs(self._vocabulary, self._logprobs.shown)

    def take_draft_detail(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        """What a chunk with `delta` tells about drafts, as a field of it; none if nobody asked."""
        if self._drafts is None:
            return {}
        shown = delta.get("content") or delta.get("reasoning_content") or ""
        return {"draft_detail": self._drafts.take(shown)}

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's own text, without the marks around it."""
        if not self._reasoning:
            return 0
        text, parts, end = self.result.text, [], 0
        for part in self._reasoning:
            begin = text.find(part, end)
            if begin >= 0:
                end = begin + len(part)
                parts.append(range(begin, end))
        spans = TokenSpans(self._vocabulary, special=self._special)
        starts = [spans.push(token).start for token in self.result.tokens]
        return sum(any(start in part for part in parts) for start in starts)

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Content):
            self._content.append(event.text)
            return {"content": event.text}
        if isinstance(event, Reasoning):
            if isinstance(self._last, Reasoning):
                self._reasoning[-1] += event.text
            else:
                self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        if self._most_calls is not None and event.index >= self._most_calls:
            return None
        if isinstance(event, ToolCallStart):
            self._calls.append(_call(event))
            return {"tool_calls": [{"index": event.index, **_call(event)}]}
        return self._arguments(event)

    def _arguments(self, event: ToolCallArguments) -> dict[str, Any]:
        self._calls[event.index]["function"]["arguments"] += event.text
        piece = {"index": event.index, "function": {"arguments": event.text}}
        return {"tool_calls": [piece]}


def _call(event: ToolCallStart) -> dict[str, Any]:
    function = {"name": event.name, "arguments": ""}
    return {"id": event.id, "type": "function", "function": function}
