"""OpenAI's own Python SDK against a real server: its assumptions hold."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from api_clients import openai
from chat_models import NOW, WEATHER
from openai_api import CERTAIN, QUESTION, user

MODEL = "any-name"


def ask(sdk: openai.OpenAI, text: str = QUESTION, **body: Any) -> Any:
    given = {"model": MODEL, "messages": user(text), "temperature": 0, **body}
    return sdk.chat.completions.create(**given)


def test_a_chat(sdk: openai.OpenAI) -> None:
    told = ask(sdk, max_completion_tokens=CERTAIN, n=2)
    assert [choice.finish_reason for choice in told.choices] == ["length", "length"]
    assert told.choices[0].message.role == "assistant"
    assert told.choices[0].message.content == told.choices[1].message.content
    assert told.usage.completion_tokens == 2 * CERTAIN
    assert told.usage.prompt_tokens_details.cached_tokens is not None
    assert told.system_fingerprint is not None
    assert told.model_extra["timings"]["draft_n"] > 0


def test_the_sdk_s_own_reading_of_a_stream(sdk: openai.OpenAI) -> None:
    """Its helper joins the chunks to a completion, and checks each on the way."""
    with sdk.chat.completions.stream(
        model=MODEL, messages=user(QUESTION), stop="(", temperature=0, logprobs=True
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk", "logprobs.content.delta"} <= kinds
    assert final.choices[0].finish_reason == "stop"
    joined = "".join(entry.token for entry in final.choices[0].logprobs.content or [])
    assert final.choices[0].message.content
    assert joined.startswith(final.choices[0].message.content)


class Colour(BaseModel):
    name: Literal["red", "green"]
    parts: list[int] = Field(min_length=2, max_length=2)
    note: str | None = Field(max_length=6)


def test_parse_gives_an_object_of_a_class(sdk: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": user("Name a colour"), "max_tokens": 96, "temperature": 0}
    told = sdk.chat.completions.parse(**asked, response_format=Colour)
    message = told.choices[0].message
    assert isinstance(message.parsed, Colour)
    assert json.loads(message.content or "") == message.parsed.model_dump()


def test_tools(tool_sdk: openai.OpenAI) -> None:
    asked = {"tools": [WEATHER, NOW], "max_tokens": 96, "parallel_tool_calls": False}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    told = ask(tool_sdk, "What is the weather?", tool_choice=choice, **asked)
    assert told.choices[0].finish_reason == "tool_calls"
    assert told.choices[0].message.content is None
    [call] = told.choices[0].message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert "city" in json.loads(call.function.arguments)
    made = told.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*user("What is the weather?"), made, result]
    again = ask(tool_sdk, messages=turns, **{**asked, "max_tokens": 4})
    assert again.choices[0].message.role == "assistant"


@pytest.mark.slow
def test_a_stream_of_tools(tool_sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": user("What is the weather?")}
    asked |= {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with tool_sdk.chat.completions.stream(**asked, max_tokens=96, temperature=0) as stream:
        events = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    [done] = events
    assert done.name == "get_weather"
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.arguments == done.arguments
    assert "city" in json.loads(done.arguments)


@pytest.mark.slow
def test_completions(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": CERTAIN, "temperature": 0}
    prompts = ["a = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "import"]
    told = sdk.completions.create(prompt=prompts, logprobs=2, **options)
    assert [choice.index for choice in told.choices] == [0, 1]
    assert len(told.choices[0].logprobs.tokens or []) == CERTAIN
    chunks = list(sdk.completions.create(prompt=prompts[0], stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == told.choices[0].text
    between = sdk.completions.create(prompt="def f(x):\n", suffix="\n    return y", **options)
    assert between.choices[0].text


@pytest.mark.slow
def test_models(sdk: openai.OpenAI) -> None:
    [served] = sdk.models.list().data
    assert sdk.models.retrieve(served.id) == served
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("another")
