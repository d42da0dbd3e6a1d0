"""The parts of an answer, as its text arrives: pieces of content, reasoning and tool calls."""

import secrets
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The model calls the tool `name`; `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """The next piece of a call's arguments.

    The pieces of a complete call join to the text of a JSON object. If the model wrote something
    else half way, or the answer was cut off, they join to the beginning of an object, which no JSON
    parser takes for complete; what the model wrote from the fault on follows as `Content`.
    """

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def joined(events: list[Event]) -> list[Event]:
    """`events` without empty ones, and with neighbours that continue each other made one."""
    whole: list[Event] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            whole.append(event)
        elif event.text:
            last = whole[-1] if whole else None
            if isinstance(last, type(event)) and replace(last, text=event.text) == event:
                whole[-1] = replace(event, text=last.text + event.text)
            else:
                whole.append(event)
    return whole
