"""OpenAI's own Python SDK against a real server: what it takes for granted holds."""

from __future__ import annotations

import json
from typing import Literal

import openai
from pydantic import BaseModel, Field

from chat_models import WEATHER
from openai_api import QUESTION, user

MODEL = "any-name"


def test_the_sdk_s_own_reading_of_a_stream(sdk: openai.OpenAI) -> None:
    """Its helper joins the chunks to a completion, and checks each on the way."""
    with sdk.chat.completions.stream(
        model=MODEL, messages=user(QUESTION), stop="(", temperature=0, logprobs=True
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk", "logprobs.content.delta"} <= kinds
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    joined = "".join(entry.token for entry in final.choices[0].logprobs.content or [])
    assert final.choices[0].message.content
    assert joined.startswith(final.choices[0].message.content)


class Colour(BaseModel):
    name: Literal["red", "green"]
    parts: list[int] = Field(min_length=2, max_length=2)
    note: str | None = Field(max_length=6)


def test_parse_gives_an_object_of_a_class(sdk: openai.OpenAI) -> None:
    told = sdk.chat.completions.parse(
        model=MODEL,
        messages=user("Name a colour"),
        response_format=Colour,
        max_tokens=96,
        temperature=0,
        extra_body={"ignore_eos": False},
    )
    message = told.choices[0].message
    assert isinstance(message.parsed, Colour)
    assert json.loads(message.content or "") == message.parsed.model_dump()


def test_a_stream_of_tools(tool_sdk: openai.OpenAI) -> None:
    with tool_sdk.chat.completions.stream(
        model=MODEL,
        messages=user("What is the weather?"),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=96,
        temperature=0,
    ) as stream:
        events = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    [done] = events
    assert done.name == "get_weather"
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.arguments == done.arguments
    assert "city" in json.loads(done.arguments)
