"""One answer to a chat while it arrives: chunks of the model in, events of the message out."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_local.chat.events import Content, Event, Reasoning, joined
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.prepared_chat import PreparedChat
from dflash_local.server.answering.token_logprobs import LogprobStream, TokenSpans, chat_logprobs


class ChatAnswer:
    """Reads one answer to a chat. Where the chat does not allow parallel calls, calls after the
    first are left out. `logprobs` tells those of its tokens, where they were asked for."""

    def __init__(self, model: Model, chat: PreparedChat, *, logprobs: bool = False) -> None:
        self._vocabulary = model.target.vocabulary
        self._special = chat.dialect.special
        self._parser = chat.dialect.parser(chat.tools.allowed, thinking_open=chat.thinking_open)
        self._most_calls = None if chat.tools.parallel else 1
        self._has_calls = False
        self._last: Event | None = None
        self._result: Result | None = None
        self.logprobs = LogprobStream(
            self._vocabulary, chat_logprobs if logprobs else None, special=self._special
        )
        self.reasoning: list[str] = []
        """Its parts, between which there was something else."""

    @property
    def result(self) -> Result:
        """The result, once the answer is complete."""
        if self._result is None:
            raise RuntimeError("this answer is not complete")
        return self._result

    @property
    def finish_reason(self) -> str:
        if self._has_calls and self.result.finish_reason == "stop":
            return "tool_calls"
        return self.result.finish_reason

    def take(self, chunk: Chunk) -> Iterator[Event]:
        """What `chunk` adds to the message; no event is without text."""
        self.logprobs.push(chunk)
        events = self._parser.feed(chunk.text)
        if chunk.result is not None:
            self._result = chunk.result
            events = joined(events + self._parser.finish())
        for event in events:
            if isinstance(event, Reasoning):
                self._think(event.text)
            elif not isinstance(event, Content):
                if self._most_calls is not None and event.index >= self._most_calls:
                    continue
                self._has_calls = True
            self._last = event
            yield event

    def _think(self, text: str) -> None:
        if isinstance(self._last, Reasoning):
            self.reasoning[-1] += text
        else:
            self.reasoning.append(text)

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's own text, without the marks around it."""
        if not self.reasoning:
            return 0
        text, parts, end = self.result.text, [], 0
        for part in self.reasoning:
            begin = text.find(part, end)
            if begin >= 0:
                end = begin + len(part)
                parts.append(range(begin, end))
        spans = TokenSpans(self._vocabulary, special=self._special)
        starts = [spans.push(token).start for token in self.result.tokens]
        return sum(any(start in part for part in parts) for start in starts)
