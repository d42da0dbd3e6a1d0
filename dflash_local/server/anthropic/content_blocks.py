"""The content blocks of a message and their events, while the answer arrives.

The events of a chat's answer come in. Each run of reasoning, each run of text and each call becomes
a block: it starts, grows, and stops before the next one starts.
"""

from collections.abc import Iterator
from typing import Any

from dflash_local.chat.conversation import complete_fields
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.server.http.event_stream import NamedEvent


def event(kind: str, **data: Any) -> NamedEvent:
    """An event, which is named as its type is."""
    return NamedEvent(kind, {"type": kind, **data})


class ContentBlocks:
    """`content` has the blocks so far, as the whole message has them. Without `thinking`, reasoning
    is left out."""

    def __init__(self, *, thinking: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._thinking = thinking
        self._is_open = False
        self._input = ""

    def take(self, added: Event) -> Iterator[NamedEvent]:
        match added:
            case Reasoning(text):
                if self._thinking:
                    yield from self._text("thinking", text)
            case Content(text):
                yield from self._text("text", text)
            case ToolCallStart(_, id, name):
                yield from self._start({"type": "tool_use", "id": id, "name": name, "input": {}})
                self._input = ""
            case ToolCallArguments(_, text):
                self._input += text
                delta = {"type": "input_json_delta", "partial_json": text}
                yield self._event("content_block_delta", delta=delta)

    def close(self) -> Iterator[NamedEvent]:
        """The event that ends the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = complete_fields(self._input)
        yield self._event("content_block_stop")

    def _text(self, kind: str, text: str) -> Iterator[NamedEvent]:
        if not self._is_open or self.content[-1]["type"] != kind:
            # Anthropic signs reasoning; here nothing does, and nothing asks for the signature.
            unsigned = {"signature": ""} if kind == "thinking" else {}
            yield from self._start({"type": kind, kind: "", **unsigned})
        self.content[-1][kind] += text
        yield self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def _start(self, block: dict[str, Any]) -> Iterator[NamedEvent]:
        yield from self.close()
        self._is_open = True
        self.content.append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _event(self, kind: str, **data: Any) -> NamedEvent:
        return event(kind, index=len(self.content) - 1, **data)
