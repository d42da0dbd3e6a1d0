"""The events of `/v1/responses`, each of them as OpenAI's own types have it."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter

from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.server.http.event_stream import NamedEvent
from dflash_local.server.openai.responses import ResponseItems

_AROUND = ("output_item.added", "content_part.added", "content_part.done", "output_item.done")


@cache
def types() -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """OpenAI's types of an event and of an item."""
    from openai.types.responses import ResponseOutputItem, ResponseStreamEvent

    return TypeAdapter(ResponseStreamEvent), TypeAdapter(ResponseOutputItem)


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


def call(index: int, name: str) -> list[Event]:
    pieces = ['{"city": "', "Oslo", '"}']
    return [
        ToolCallStart(index, f"call_{index}", name),
        *(ToolCallArguments(index, piece) for piece in pieces),
    ]


def made(added: list[Event], status: str = "completed") -> tuple[list[Any], list[Any]]:
    """The events, read as a client reads them, and the items."""
    of_event, of_item = types()
    items = ResponseItems()
    told: list[NamedEvent] = [event for each in added for event in items.take(each)]
    told += items.close(status)
    assert [event.name for event in told] == [event.data["type"] for event in told]
    assert [event.data["sequence_number"] for event in told] == list(range(len(told)))
    read = [of_event.validate_python(event.data) for event in told]
    return read, [of_item.validate_python(item) for item in items.output]


def several() -> Iterator[list[Event]]:
    """Answers of each kind, and fifty drawn at random."""
    yield [Reasoning("hm"), Content("a"), Content("b")]
    yield [Content("so"), *call(0, "look"), *call(1, "see")]
    yield [Reasoning("hm"), *call(0, "look"), Content("a")]
    rng = random.Random(0)
    for _ in range(50):
        added: list[Event] = []
        for n in range(rng.randrange(1, 6)):
            kind = rng.choice([Content, Reasoning, None])
            added += call(n, f"f{n}") if kind is None else [kind(rng.choice("abc"))] * 2
        yield added


def kinds(added: list[Event]) -> list[str]:
    """Of the items that they make: neighbours of one kind are one."""
    names = {Content: "message", Reasoning: "reasoning", ToolCallStart: "function_call"}
    found = [(e.index if isinstance(e, ToolCallStart) else "", names.get(type(e))) for e in added]
    return [kind for (_, kind), _ in groupby(each for each in found if each[1]) if kind]


def test_each_item_is_added_grows_and_is_done() -> None:
    for added in several():
        events, items = made(added)
        assert [item.type for item in items] == kinds(added)
        assert [event.output_index for event in events] == sorted(e.output_index for e in events)
        for index, item in enumerate(items):
            own = [event for event in events if event.output_index == index]
            types = [event.type.removeprefix("response.") for event in own]
            assert list(dict.fromkeys(types)) == TYPES[item.type]
            joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
            text = item.arguments if item.type == "function_call" else item.content[0].text
            assert joined == text
            assert own[0].item.id == own[-1].item.id == item.id
            assert own[0].item.status == "in_progress"
            assert own[-1].item == item
            assert {event.item_id for event in own[1:-1]} == {item.id}


def test_an_answer_that_was_cut_off_says_so() -> None:
    events, items = made([Content("a")], "incomplete")
    assert events[-1].item.status == items[-1].status == "incomplete"
