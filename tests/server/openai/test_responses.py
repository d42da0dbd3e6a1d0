"""`/v1/responses` by OpenAI's own SDK against a real server; its events by OpenAI's own types."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter

from api_clients import openai
from chat_models import WEATHER
from dflash_local import Model
from dflash_local.chat.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dflash_local.server.http.event_stream import NamedEvent
from dflash_local.server.openai.responses import ResponseItems
from openai_api import QUESTION, SAMPLER, post, refused, user

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "strict": True, **WEATHER["function"]}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]
    sure: bool


def ask(sdk: openai.OpenAI, **body: Any) -> Any:
    return sdk.responses.create(**{"model": "any", "input": QUESTION, "temperature": 0, **body})


def test_an_answer_is_the_model_s_own(sdk: openai.OpenAI, model: Model) -> None:
    extra = {"seed": 7, "cache_prompt": False}
    told = ask(sdk, max_output_tokens=24, temperature=0.8, extra_body=extra)
    own = model.chat(user(QUESTION), max_tokens=24, temperature=0.8, seed=7, **SAMPLER)
    assert told.output_text == own.text
    assert told.usage.output_tokens == len(own.tokens) == 24
    assert told.usage.input_tokens == len(model.chat_prompt(user(QUESTION)))
    assert told.usage.output_tokens_details.reasoning_tokens == 0
    assert told.store is False
    assert (told.status, told.model) == ("incomplete", "tiny-coder-q8_0")
    assert told.incomplete_details.reason == "max_output_tokens"
    assert told.timings["draft_n"] > 0


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


def test_a_conversation_is_the_chat_s(sdk: openai.OpenAI, client: httpx.Client) -> None:
    rest = [{"role": "assistant", "content": "def add(a, b):"}, *user("Go on.")]
    first = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    told = ask(sdk, instructions="Be brief.", input=[first, *rest], max_output_tokens=8)
    messages = [{"role": "system", "content": "Be brief."}, *user(QUESTION), *rest]
    chat = post(client, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0)
    assert told.output_text == chat["choices"][0]["message"]["content"]
    assert told.usage.input_tokens == chat["usage"]["prompt_tokens"]


def test_what_was_answered_goes_back_in(sdk: openai.OpenAI) -> None:
    """As programs do that keep the conversation themselves."""
    first = ask(sdk, max_output_tokens=16)
    turns = [*user(QUESTION), *first.output, *user("Go on.")]
    again = ask(sdk, input=turns, max_output_tokens=4)
    reused = again.usage.input_tokens_details.cached_tokens
    assert reused >= first.usage.input_tokens


@pytest.mark.slow
def test_a_schema_binds_the_answer(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "input": "Is 7 a prime?", "max_output_tokens": 100}
    asked |= {"text_format": Verdict, "extra_body": {"seed": 1}}
    told = sdk.responses.parse(**asked)
    assert told.status == "completed"
    assert isinstance(told.output_parsed, Verdict)
    with sdk.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == told.output_parsed
    free = ask(sdk, text={"format": {"type": "json_object"}}, max_output_tokens=40)
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
    turns = [*asked["input"], *told.output, output]
    after = ask(tool_sdk, input=turns, tools=[TOOL], max_output_tokens=4)
    assert after.usage.input_tokens > told.usage.input_tokens


def test_logprobs_come_with_the_text(sdk: openai.OpenAI) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = ask(sdk, **asked, max_output_tokens=6).output
    (part,) = item.content
    assert (item.type, part.type) == ("message", "output_text")
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_nothing_is_stored(client: httpx.Client) -> None:
    told = post(client, PATH, input=QUESTION, store=True, max_output_tokens=1)
    assert told["store"] is False
    error = refused(client, PATH, input="a", previous_response_id=told["id"])
    assert error["code"] == "previous_response_not_found"
    assert "whole conversation" in error["message"]


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
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
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


THOUGHT, TEXT = Reasoning("hm"), Content("a")
ANSWERS: dict[str, list[Event]] = {
    "reasoning message": [THOUGHT, THOUGHT, TEXT, TEXT],
    "message function_call function_call reasoning": [TEXT, *call(0, "a"), *call(1, "b"), THOUGHT],
    "reasoning function_call message reasoning": [THOUGHT, *call(0, "look"), TEXT, THOUGHT],
}
"""Each kind of item after each, and the kinds that the items have."""


def test_each_item_is_added_grows_and_is_done() -> None:
    for kinds, added in ANSWERS.items():
        events, items = made(added)
        assert " ".join(item.type for item in items) == kinds
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
