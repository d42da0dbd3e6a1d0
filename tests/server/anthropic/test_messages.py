"""Anthropic's own Python SDK against a real server: its assumptions hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from api_clients import anthropic, of_anthropic
from chat_models import WEATHER
from dflash_local import Model
from openai_api import CERTAIN, QUESTION, SAMPLER, user
from server_process import ServerProcess

GREEDY = {"temperature": 0, "cache_prompt": False}
TOOL: dict[str, Any] = {
    "name": WEATHER["function"]["name"],
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture
def sdk(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with of_anthropic(server) as connected:
        yield connected


@pytest.fixture
def tool_sdk(tool_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with of_anthropic(tool_server) as connected:
        yield connected


def ask(sdk: anthropic.Anthropic, **body: Any) -> Any:
    """The answer to a question; fields that the SDK lacks go into the body as they are."""
    extra = {**GREEDY, **body.pop("extra_body", {})}
    given = {"model": "any-name", "max_tokens": CERTAIN, "messages": user(QUESTION)}
    return sdk.messages.create(**{**given, **body}, extra_body=extra)


def n_prompt(sdk: anthropic.Anthropic, **body: Any) -> int:
    """Tokens of a prompt."""
    return sdk.messages.count_tokens(model="any-name", **body).input_tokens


def text(message: Any) -> str:
    assert all(block.type == "text" for block in message.content)
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_turn_without_blocks_is_an_empty_text(sdk: anthropic.Anthropic) -> None:
    turns = [*user("a"), {"role": "assistant", "content": "b"}]
    for before in ([], turns):
        blocks, empty = ([*before, {"role": "user", "content": given}] for given in ([], ""))
        assert n_prompt(sdk, messages=blocks) == n_prompt(sdk, messages=empty)
    assert ask(sdk, messages=[{"role": "user", "content": []}]).usage.output_tokens


def test_a_drawn_answer_is_the_model_s_own(sdk: anthropic.Anthropic, model: Model) -> None:
    told = ask(sdk, max_tokens=24, extra_body={"temperature": 0.8, "seed": 7})
    own = model.chat(user(QUESTION), max_tokens=24, temperature=0.8, seed=7, **SAMPLER)
    assert text(told) == own.text
    assert (told.type, told.role, told.model) == ("message", "assistant", "tiny-coder-q8_0")
    assert (told.stop_reason, told.stop_sequence) == ("max_tokens", None)
    assert told.usage.input_tokens == len(model.chat_prompt(user(QUESTION)))
    assert told.usage.cache_read_input_tokens == 0
    assert told.usage.output_tokens == len(own.tokens)
    assert told.model_extra["timings"]["draft_n"] > 0


def test_a_stop_sequence_is_named(sdk: anthropic.Anthropic) -> None:
    bound = {"grammar": 'root ::= "one END two"'}
    # More tokens than the context holds, as agents allow.
    told = ask(sdk, max_tokens=20_000, stop_sequences=["never", "END"], extra_body=bound)
    assert text(told) == "one "
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "END")
    ended = ask(sdk, max_tokens=32, stop_sequences=["never"], extra_body=bound)
    assert text(ended) == "one END two"
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_the_system_prompt_and_blocks_make_the_prompt(
    sdk: anthropic.Anthropic, model: Model
) -> None:
    count = partial(n_prompt, sdk)
    spoken = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "One\nTwo"},
        {"role": "assistant", "content": "Three"},
        {"role": "user", "content": "Four"},
    ]
    expected = len(model.chat_prompt(spoken))
    part = {"type": "text", "cache_control": {"type": "ephemeral"}}
    blocks = {
        "system": [{**part, "text": "Be brief."}, {**part, "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": [{**part, "text": "One"}, {**part, "text": "Two"}]},
            {"role": "assistant", "content": [{**part, "text": "Three"}]},
            {"role": "user", "content": "Four"},
        ],
    }
    assert count(**blocks) == expected
    # Neighbours of one role are one turn.
    apart = [*user("One"), *user("Two"), *blocks["messages"][1:]]
    assert count(system="Be brief.\nBe kind.", messages=apart) == expected
    # What Claude Code tells of itself is for Anthropic, and would keep the rest out of the cache.
    attribution = (
        "x-anthropic-billing-header: cc_version=2.1.288.0a1; cc_entrypoint=cli; cch=1b2c3;"
    )
    blocks["system"].insert(0, {"type": "text", "text": attribution})
    assert count(**blocks) == expected


def test_an_answer_goes_on_from_its_beginning(sdk: anthropic.Anthropic) -> None:
    bound = {"grammar": 'root ::= "b): return a + b"'}
    begun = {"role": "assistant", "content": "def add(a, "}
    told = ask(sdk, max_tokens=32, messages=[*user(QUESTION), begun], extra_body=bound)
    assert text(told) == "b): return a + b"
    plain = ask(sdk, max_tokens=1)
    assert told.usage.input_tokens > plain.usage.input_tokens


def test_the_cached_part_of_a_prompt_is_told(sdk: anthropic.Anthropic) -> None:
    asked = {"messages": user("Of what was in the cache the usage tells."), "max_tokens": 1}
    first = ask(sdk, **asked, extra_body={"cache_prompt": True}).usage
    again = ask(sdk, **asked, extra_body={"cache_prompt": True}).usage
    assert again.cache_read_input_tokens > 0
    total = first.input_tokens + first.cache_read_input_tokens
    assert again.input_tokens + again.cache_read_input_tokens == total


# Tools.


def test_a_tool_is_called_and_its_result_goes_back_in(tool_sdk: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"messages": user("What is the weather?"), "max_tokens": 96}
    # What Anthropic runs itself is not here.
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    told = ask(tool_sdk, **asked, tools=tools, tool_choice=choice)
    assert told.stop_reason == "tool_use"
    [call] = told.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert isinstance(call.input["city"], str)
    with tool_sdk.messages.stream(
        model="any", tools=[TOOL], tool_choice=choice, extra_body=GREEDY, **asked
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message().content
    assert json.loads("".join(pieces)) == call.input
    assert [block.input for block in streamed if block.type == "tool_use"] == [call.input]

    turn = [*asked["messages"], {"role": "assistant", "content": told.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    in_parts = {**result, "content": [{"type": "text", "text": "It rains."}]}
    count = partial(n_prompt, tool_sdk, tools=[TOOL])
    after = count(messages=[*turn, {"role": "user", "content": [result]}])
    assert after > count(messages=turn)
    assert count(messages=[*turn, {"role": "user", "content": [in_parts]}]) == after
    again = ask(tool_sdk, tools=[TOOL], messages=[*turn, {"role": "user", "content": [result]}])
    assert again.role == "assistant"


def test_any_tool_and_none(tool_sdk: anthropic.Anthropic) -> None:
    question = user("What is the weather?")
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    told = ask(tool_sdk, tools=[TOOL], tool_choice=any_one, messages=question, max_tokens=96)
    assert any(block.type == "tool_use" for block in told.content)
    none = n_prompt(tool_sdk, messages=question, tools=[TOOL], tool_choice={"type": "none"})
    assert none == n_prompt(tool_sdk, messages=question)


@pytest.mark.slow
def test_a_call_that_is_cut_off_has_the_part_of_its_input_that_is_whole(
    tool_sdk: anthropic.Anthropic,
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}'
    bound = {"grammar": f"root ::= {json.dumps(call)}"}
    question = user("What is the weather?")
    inputs = []
    for n in (20, 23, 64):
        told = ask(tool_sdk, tools=[TOOL], messages=question, max_tokens=n, extra_body=bound)
        inputs += [block.input for block in told.content if block.type == "tool_use"]
    whole = {"city": "Rome", "days": 3}
    assert inputs[0] == {}
    assert inputs[-1] == whole
    assert all(found.items() <= whole.items() for found in inputs)


# Reasoning.

THOUGHT = {"grammar": r'root ::= "<think>\nOh\n</think>\n\nTwo"'}


def test_what_the_model_thinks_is_a_block_of_its_own(tool_sdk: anthropic.Anthropic) -> None:
    told = ask(tool_sdk, max_tokens=64, thinking={"type": "adaptive"}, extra_body=THOUGHT)
    thought, said = told.content
    assert thought.type == "thinking"
    assert thought.thinking == "Oh"
    assert said.type == "text"
    assert said.text == "Two"
    assert 0 < told.usage.output_tokens_details.thinking_tokens < told.usage.output_tokens
    asked: dict[str, Any] = {"model": "any", "max_tokens": 64, "messages": user(QUESTION)}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    with tool_sdk.messages.stream(**asked, extra_body={**GREEDY, **THOUGHT}) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
    assert "".join(thoughts) == "Oh"
    # It goes back in with the conversation.
    turn = [*user(QUESTION), {"role": "assistant", "content": told.content}, *user("Go on.")]
    assert ask(tool_sdk, messages=turn).content


def test_thoughts_are_shown_only_where_asked_for(tool_sdk: anthropic.Anthropic) -> None:
    for thinking in ({"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        told = ask(tool_sdk, max_tokens=64, thinking=thinking, extra_body=THOUGHT)
        assert text(told) == "Two"


def test_thoughts_end_after_their_budget(tool_sdk: anthropic.Anthropic) -> None:
    thought = {"grammar": r'root ::= "<think>" [a-z]+ "</think>" [a-z]+'}
    thinking = {"type": "enabled", "budget_tokens": 6}
    told = ask(tool_sdk, max_tokens=40, thinking=thinking, extra_body=thought)
    assert [block.type for block in told.content] == ["thinking", "text"]
    details = told.usage.output_tokens_details
    assert details is not None and details.thinking_tokens < 20


def test_a_model_is_told_whether_to_think(tool_sdk: anthropic.Anthropic) -> None:
    """The template of Qwen3 writes an empty reasoning part for one that shall not."""
    count = partial(n_prompt, tool_sdk, messages=user("Hi"))
    thinks = count(thinking={"type": "enabled", "budget_tokens": 2048})
    assert count() == count(thinking={"type": "disabled"}) > thinks


def test_a_schema_binds_the_answer(tool_sdk: anthropic.Anthropic) -> None:
    form = {"type": "json_schema", "schema": {"const": {"title": "two"}}}
    told = ask(tool_sdk, max_tokens=64, extra_body={"output_config": {"format": form}})
    assert json.loads(text(told)) == {"title": "two"}


def test_a_prompt_that_is_too_long_is_told_in_anthropic_s_words(sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: request"):
        ask(sdk, messages=user("a b c d " * 100_000))
