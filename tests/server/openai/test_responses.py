"""`/v1/responses` by OpenAI's own SDK, against a real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

from chat_models import WEATHER
from dflash_local import Model
from later import Later
from openai_api import QUESTION, SAMPLER, post, refused, user

openai = Later("openai")

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "strict": True, **WEATHER["function"]}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    sure: bool


def test_an_answer_is_the_model_s_own(sdk: openai.OpenAI, model: Model) -> None:
    told = sdk.responses.create(
        model="any",
        input=QUESTION,
        max_output_tokens=24,
        temperature=0.8,
        extra_body={"seed": 7, "cache_prompt": False},
    )
    own = model.chat(user(QUESTION), max_tokens=24, temperature=0.8, seed=7, **SAMPLER)
    assert told.output_text == own.text
    assert told.usage is not None
    assert told.usage.output_tokens == len(own.tokens) == 24
    assert told.usage.input_tokens == len(model.chat_prompt(user(QUESTION)))
    assert told.usage.output_tokens_details.reasoning_tokens == 0
    assert told.store is False  # type: ignore[attr-defined]
    assert (told.status, told.model) == ("incomplete", "tiny-coder-q8_0")
    assert told.incomplete_details is not None
    assert told.incomplete_details.reason == "max_output_tokens"
    assert told.timings["draft_n"] > 0  # type: ignore[attr-defined]


def test_a_last_message_of_the_assistant_begins_the_answer(client: httpx.Client) -> None:
    messages = [*user(QUESTION), {"role": "assistant", "content": "def add(a, "}]
    chat = {"messages": messages, "max_tokens": 8, "temperature": 0}
    expected = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]
    told = post(client, PATH, input=messages, max_output_tokens=8, temperature=0)
    assert told["output"][0]["content"][0]["text"] == expected["content"]


def test_an_earlier_answer_with_reasoning_is_whole(client: httpx.Client) -> None:
    """What a client sends that goes on from an answer that was cut short."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a sum"}]}
    given = [*user(QUESTION), thought, {"role": "assistant", "content": "def add(a, "}]
    assert post(client, PATH, input=given, max_output_tokens=8)["output"]


def test_a_stream_is_the_whole_answer_in_events(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"input": QUESTION, "max_output_tokens": 12, "temperature": 0}
    whole = sdk.responses.create(model="any", **asked)
    with sdk.responses.stream(model="any", **asked) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(types[4:-4]) == {"response.output_text.delta"}
    assert len(types[4:-4]) > 1
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 12
    assert len({event.response.id for event in (events[0], events[1], last)}) == 1


def test_the_bytes_of_a_stream(client: httpx.Client) -> None:
    body = {"input": QUESTION, "max_output_tokens": 3, "temperature": 0, "stream": True}
    answer = client.post(PATH, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, end = answer.text.split("\n\n")
    assert end == ""
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        assert told["sequence_number"] == number
    assert "[DONE]" not in answer.text


def test_a_conversation_is_the_chat_s(sdk: openai.OpenAI, client: httpx.Client) -> None:
    told = sdk.responses.create(
        model="any",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
            {"role": "assistant", "content": "def add(a, b):"},
            {"role": "user", "content": "Go on."},
        ],
        max_output_tokens=8,
        temperature=0,
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        *user(QUESTION),
        {"role": "assistant", "content": "def add(a, b):"},
        *user("Go on."),
    ]
    chat = post(client, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
    assert told.output_text == chat["choices"][0]["message"]["content"]
    assert told.usage is not None
    assert told.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_what_was_answered_goes_back_in(sdk: openai.OpenAI) -> None:
    """As programs do that keep the conversation themselves."""
    first = sdk.responses.create(model="any", input=QUESTION, max_output_tokens=16, temperature=0)
    again = sdk.responses.create(
        model="any",
        input=[*user(QUESTION), *first.output, *user("Go on.")],  # type: ignore[list-item]
        max_output_tokens=4,
        temperature=0,
    )
    assert first.usage is not None
    assert again.usage is not None
    reused = again.usage.input_tokens_details.cached_tokens
    assert reused >= first.usage.input_tokens


@pytest.mark.slow
def test_a_schema_binds_the_answer(sdk: openai.OpenAI) -> None:
    told = sdk.responses.parse(
        model="any",
        input="Is 7 a prime?",
        text_format=Verdict,
        max_output_tokens=100,
        extra_body={"seed": 1},
    )
    assert told.status == "completed"
    assert isinstance(told.output_parsed, Verdict)
    with sdk.responses.stream(
        model="any",
        input="Is 7 a prime?",
        text_format=Verdict,
        max_output_tokens=100,
        extra_body={"seed": 1},
    ) as stream:
        assert stream.get_final_response().output_parsed == told.output_parsed
    free = sdk.responses.create(
        model="any",
        input="Anything.",
        text={"format": {"type": "json_object"}},
        max_output_tokens=40,
        extra_body={"seed": 1},
    )
    if free.status == "completed":
        assert isinstance(json.loads(free.output_text), dict)
    assert free.output_text.lstrip().startswith("{")


def calls(told: Any) -> list[Any]:
    return [item for item in told.output if item.type == "function_call"]


def test_a_tool_is_called_and_its_output_goes_back_in(tool_sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "input": user("What is the weather in Oslo?"),
        "tools": [TOOL, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "extra_body": {"seed": 3},
    }
    told = tool_sdk.responses.create(**asked)
    (call,) = calls(told)
    assert call.name == "get_weather"
    assert isinstance(json.loads(call.arguments)["city"], str)
    assert [tool.type for tool in told.tools] == ["function"]  # what OpenAI runs is not here
    with tool_sdk.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    final = events[-1]
    assert final.type == "response.completed"
    assert [item.name for item in calls(final.response)] == ["get_weather"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"sun": true}'}
    after = tool_sdk.responses.create(
        model="any",
        input=[*asked["input"], *told.output, output],
        tools=[TOOL],  # type: ignore[list-item]
        max_output_tokens=4,
    )
    assert told.usage is not None
    assert after.usage is not None
    assert after.usage.input_tokens > told.usage.input_tokens


def test_logprobs_come_with_the_text(sdk: openai.OpenAI) -> None:
    told = sdk.responses.create(
        model="any",
        input=QUESTION,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=6,
        temperature=0,
    )
    (item,) = told.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "a", "background": True}, "background"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": 3}]}]},
            "input",
        ),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "a", "tools": [{"type": "mcp", "server_label": "a"}]}, "tools"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text"),
    ],
)
def test_a_bad_field_is_named(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert str(refused(client, PATH, **body)["param"]).startswith(param)


def test_nothing_is_stored(client: httpx.Client) -> None:
    told = post(client, PATH, input=QUESTION, store=True, max_output_tokens=1)
    assert told["store"] is False
    error = refused(client, PATH, input="a", previous_response_id=told["id"])
    assert error["code"] == "previous_response_not_found"
    assert "whole conversation" in error["message"]
