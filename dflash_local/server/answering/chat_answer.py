"""One answer to a chat while it arrives: chunks of the model in, events of the message out."""

from dflash_local.chat.events import Event
from dflash_local.chat.reader import ChatReader
from dflash_local.model import Model
from dflash_local.result import Chunk, Result
from dflash_local.server.answering.prepared_chat import PreparedChat
from dflash_local.server.answering.token_logprobs import LogprobStream, TokenSpans, chat_logprobs


class ChatAnswer(ChatReader):
    """Reads one answer to a chat. If the chat does not allow parallel calls, calls after the
    first are left out. `logprobs` tells those of its tokens, where they were asked for.
    `raw_thoughts` leaves reasoning in the content."""

    def __init__(
        self,
        model: Model,
        chat: PreparedChat,
        *,
        logprobs: bool = False,
        raw_thoughts: bool = False,
    ) -> None:
        dialect = chat.dialect.without_reasoning() if raw_thoughts else chat.dialect
        parser = dialect.parser(chat.tools.allowed, thinking_open=chat.thinking_open)
        super().__init__(parser, None if chat.tools.parallel else 1)
        self._vocabulary = model.target.vocabulary
        self._special = chat.dialect.special
        self._result: Result | None = None
        self.logprobs = LogprobStream(
            self._vocabulary, chat_logprobs if logprobs else None, special=self._special
        )

    @property
    def result(self) -> Result:
        """The result, once the answer is complete."""
        if self._result is None:
            raise RuntimeError("this answer is not complete")
        return self._result

    @property
    def finish_reason(self) -> str:
        reason = self.result.finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason

    def take(self, chunk: Chunk) -> list[Event]:
        self.logprobs.push(chunk)
        self._result = chunk.result
        return super().take(chunk)

    @property
    def n_reasoning_tokens(self) -> int:
        """Tokens of the reasoning's own text, without the marks around it."""
        if not self.thoughts:
            return 0
        text, parts, end = self.result.text, [], 0
        for part in self.thoughts:
            begin = text.find(part, end)
            if begin >= 0:
                end = begin + len(part)
                parts.append(range(begin, end))
        spans = TokenSpans(self._vocabulary, special=self._special)
        starts = [spans.push(token).start for token in self.result.tokens]
        return sum(any(start in part for part in parts) for start in starts)
