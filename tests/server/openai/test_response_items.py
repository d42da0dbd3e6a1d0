"""The events of `/v1/responses`, each of them as OpenAI's own types have it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from dflash_local.server.http.event_stream import NamedEvent
from dflash_local.server.openai.response_items import ResponseItems

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
_AROUND = ("output_item.added", "content_part.added", "content_part.done", "output_item.done")


def text_types(kind: str) -> list[str]:
    added, begun, ended, done = _AROUND
    return [added, begun, f"{kind}.delta", f"{kind}.done", ended, done]


TYPES = {
    "reasoning": text_types("reasoning_text"),
    "message": text_types("output_text"),
    "function_call": [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ],
}


def call(index: int, name: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": ""}
    start = {"index": index, "id": f"call_{index}", "type": "function", "function": function}
    pieces = ['{"city": "', "Oslo", '"}']
    return [{"tool_calls": [start]}] + [
        {"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces
    ]


def made(deltas: list[dict[str, Any]], status: str = "completed") -> tuple[list[Any], list[Any]]:
    """The events, read as a client reads them, and the items."""
    items = ResponseItems()
    told: list[NamedEvent] = [event for delta in deltas for event in items.take(delta)]
    told += items.close(status)
    assert [event.name for event in told] == [event.data["type"] for event in told]
    assert [event.data["sequence_number"] for event in told] == list(range(len(told)))
    return [EVENT.validate_python(event.data) for event in told], [
        ITEM.validate_python(item) for item in items.output
    ]


@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([{"content": "a"}, {"content": "b"}], ["message"]),
        ([{"reasoning_content": "hm"}, {"content": "a"}], ["reasoning", "message"]),
        (call(0, "look"), ["function_call"]),
        (
            [{"content": "so"}, *call(0, "look"), *call(1, "see")],
            ["message", "function_call", "function_call"],
        ),
        (
            [{"reasoning_content": "hm"}, *call(0, "look"), {"content": "a"}],
            ["reasoning", "function_call", "message"],
        ),
    ],
)
def test_each_item_is_added_grows_and_is_done(
    deltas: list[dict[str, Any]], kinds: list[str]
) -> None:
    events, items = made(deltas)
    assert [item.type for item in items] == kinds
    for index, kind in enumerate(kinds):
        types = [e.type.removeprefix("response.") for e in events if e.output_index == index]
        assert list(dict.fromkeys(types)) == TYPES[kind]
    assert [event.output_index for event in events] == sorted(e.output_index for e in events)


def test_deltas_join_to_what_is_done() -> None:
    rng = random.Random(0)
    for _ in range(50):
        deltas: list[dict[str, Any]] = []
        for n in range(rng.randrange(1, 6)):
            kind = rng.choice(["content", "reasoning_content", "call"])
            deltas += call(n, f"f{n}") if kind == "call" else [{kind: rng.choice("abc")}] * 2
        events, items = made(deltas)
        for index, item in enumerate(items):
            own = [event for event in events if event.output_index == index]
            joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
            text = item.arguments if item.type == "function_call" else item.content[0].text
            assert joined == text
            assert own[0].item.id == own[-1].item.id == item.id
            assert own[0].item.status == "in_progress"
            assert own[-1].item == item
            assert {event.item_id for event in own[1:-1]} == {item.id}


def test_an_answer_that_was_cut_off_says_so() -> None:
    events, items = made([{"content": "a"}], "incomplete")
    assert events[-1].item.status == items[-1].status == "incomplete"
