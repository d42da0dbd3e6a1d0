"""The output items of a response and their events, while the answer arrives.

The events of a chat's answer come in. Each run of reasoning, each run of text and each call becomes
an item: it is added, grows, and is done before the next one is added.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.server.http.event_stream import NamedEvent


class ResponseItems:
    """`output` has the items so far, as the whole response has them."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._n_events = 0

    def event(self, name: str, /, **data: Any) -> NamedEvent:
        """The next event; events are numbered."""
        event = NamedEvent(name, {"type": name, "sequence_number": self._n_events, **data})
        self._n_events += 1
        return event

    def take(
        self, event: Event, logprobs: list[dict[str, Any]] | None = None
    ) -> Iterator[NamedEvent]:
        match event:
            case Reasoning(text):
                yield from self._text("reasoning", text, None)
            case Content(text):
                yield from self._text("message", text, logprobs)
            case ToolCallStart(_, call_id, name):
                yield from self.close()
                item = {
                    "id": _id("fc"),
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call_id,
                    "name": name,
                    "arguments": "",
                }
                yield from self._add(item)
            case ToolCallArguments(_, text) if self._open is not None:
                self._open["arguments"] += text
                name = "response.function_call_arguments.delta"
                yield self.event(name, **self._where(self._open), delta=text)

    def close(self, status: str = "completed") -> Iterator[NamedEvent]:
        """The events that end the open item; `status` is "incomplete" for an answer cut off."""
        item = self._open
        if item is None:
            return
        self._open = None
        item["status"] = status
        where = self._where(item)
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self.event(
                "response.function_call_arguments.done", **where, name=name, arguments=arguments
            )
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            where["content_index"] = 0
            kind = f"response.{part['type']}.done"
            yield self.event(kind, **where, text=part["text"], **logprobs)
            yield self.event("response.content_part.done", **where, part=dict(part))
        yield self._item("response.output_item.done", item)

    def _text(
        self, kind: str, text: str, logprobs: list[dict[str, Any]] | None
    ) -> Iterator[NamedEvent]:
        item = self._open
        if item is None or item["type"] != kind:
            yield from self.close()
            item, first = _text_item(kind)
            yield from self._add(item)
            item["content"].append(first)
            yield self.event(
                "response.content_part.added",
                **self._where(item),
                content_index=0,
                part=_snapshot(first),
            )
        part = item["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs or []
            more["logprobs"] = logprobs or []
        name = f"response.{part['type']}.delta"
        yield self.event(name, **self._where(item), content_index=0, delta=text, **more)

    def _add(self, item: dict[str, Any]) -> Iterator[NamedEvent]:
        self._open = item
        self.output.append(item)
        yield self._item("response.output_item.added", item)

    def _item(self, name: str, item: Mapping[str, Any]) -> NamedEvent:
        return self.event(name, output_index=len(self.output) - 1, item=_snapshot(item))

    def _where(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.output) - 1}


def _snapshot(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that keeps its lists while the original's grow."""
    return {name: list(v) if isinstance(v, list) else v for name, v in fields.items()}


def _text_item(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An item without content, and the first part of its content."""
    item: dict[str, Any]
    part: dict[str, Any]
    if kind == "message":
        item = {"id": _id("msg"), "type": kind, "role": "assistant"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    else:
        item = {"id": _id("rs"), "type": kind, "summary": []}
        part = {"type": "reasoning_text", "text": ""}
    return item | {"status": "in_progress", "content": []}, part


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
