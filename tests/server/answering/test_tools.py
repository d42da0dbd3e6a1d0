"""Tools and reasoning over `/v1/chat/completions`, with the chat template of Qwen3.

The tiny model was taught neither, so it is bound to write what a model of that family would.
"""

import json
from functools import partial
from typing import Any

import httpx
import pytest

from chat_models import NOW, WEATHER
from dflash_local import Model
from openai_api import CHAT, QUESTION, post, streamed, user

TOOLS = [WEATHER, NOW]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def wrote(text: str) -> dict[str, Any]:
    """Fields that bind the model to write `text`."""
    return {"grammar": f"root ::= {json.dumps(text)}"}


def ask(client: httpx.Client, **body: Any) -> Any:
    given = {"messages": user("What is the weather?"), "max_tokens": 96, "temperature": 0}
    return post(client, CHAT, **{**given, **body})["choices"][0]


def n_prompt(client: httpx.Client, **body: Any) -> int:
    n = post(client, f"{CHAT}/input_tokens", **body)["input_tokens"]
    assert isinstance(n, int)
    return n


def assert_weather(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert isinstance(arguments["city"], str)
    assert set(arguments) <= {"city", "days"}
    assert 1 <= arguments.get("days", 1) <= 9


def test_of_the_tools_that_are_allowed_one_is_called(tool_client: httpx.Client) -> None:
    allowed = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    told = ask(tool_client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in told["message"]["tool_calls"]] == ["now"]


def test_a_model_may_call_of_itself(tool_client: httpx.Client) -> None:
    told = ask(tool_client, tools=TOOLS, **wrote(f"One moment.\n{CALL}"))
    assert told["message"]["content"].strip() == "One moment."
    [call] = told["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert told["finish_reason"] == "tool_calls"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("several", [True, False])
def test_one_call_or_several(tool_client: httpx.Client, several: bool) -> None:
    told = ask(tool_client, tools=TOOLS, parallel_tool_calls=several, **wrote(f"{CALL}\n{CALL}"))
    calls = told["message"]["tool_calls"]
    assert len(calls) == 1 + several
    assert len({call["id"] for call in calls}) == len(calls)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("text", "body"),
    [
        (CALL, {}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}),
        (CALL.replace("now", "later"), {"tools": TOOLS}),
        ("```\n" + CALL + "\n```", {"tools": TOOLS}),
    ],
)
def test_what_only_looks_like_a_call_is_text(
    tool_client: httpx.Client, text: str, body: dict[str, Any]
) -> None:
    told = ask(tool_client, **body, **wrote(text))
    assert told["message"]["content"] == text
    assert "tool_calls" not in told["message"]
    assert told["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_is_no_finished_one(tool_client: httpx.Client) -> None:
    told = ask(tool_client, tools=[WEATHER], tool_choice="required", max_tokens=36)
    assert told["finish_reason"] == "length"


def test_the_arguments_of_an_earlier_call_may_be_an_object(tool_client: httpx.Client) -> None:
    prompts = []
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        call = {"id": "a", "type": "function"}
        call |= {"function": {"name": "get_weather", "arguments": arguments}}
        messages = [*user("Weather?"), {"role": "assistant", "tool_calls": [call]}]
        body = {"messages": messages, "tools": TOOLS}
        prompts.append(tool_client.post("/apply-template", json=body).json()["prompt"])
    assert prompts[0] == prompts[1] and "Köln" in prompts[0]


def test_reasoning_is_told_apart(tool_client: httpx.Client, model: Model) -> None:
    body = {"messages": user(QUESTION), **wrote("<think>\nhm, two\n</think>\n\n1 + 1")}
    whole = post(tool_client, CHAT, **body)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "hm, two"
    assert message["content"] == "1 + 1"
    details = whole["usage"]["completion_tokens_details"]
    assert 2 <= details["reasoning_tokens"] <= len("hm, two")


def test_reasoning_may_stay_in_the_content(tool_client: httpx.Client) -> None:
    written = "<think>\nhm, two\n</think>\n\n1 + 1"
    body = {"messages": user(QUESTION), **wrote(written), "reasoning_format": "none"}
    assert post(tool_client, CHAT, **body)["choices"][0]["message"]["content"] == written
    deltas = [c["choices"][0]["delta"] for c in streamed(tool_client, CHAT, **body)]
    assert "".join(d.get("content", "") for d in deltas) == written


def test_a_schema_binds_what_comes_after_the_reasoning(tool_client: httpx.Client) -> None:
    body = {"messages": user(QUESTION), "max_tokens": 64, "temperature": 0}
    named = {"name": "x", "schema": {"const": {"a": 1}}}
    body |= {"response_format": {"type": "json_schema", "json_schema": named}}
    answer = post(tool_client, CHAT, **body, reasoning_effort="none")
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    # Free to think first, the model may go on with that to the last token.
    message = post(tool_client, CHAT, **body)["choices"][0]["message"]
    assert "reasoning_content" in message or json.loads(message["content"]) == {"a": 1}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("likely", ["{", "<tool_call>"])
def test_with_tools_and_a_schema_the_answer_is_a_call_or_of_the_schema(
    tool_client: httpx.Client, model: Model, likely: str
) -> None:
    bound = {
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object", "schema": {"const": {"a": 1}}},
        # The tiny model would do neither.
        "logit_bias": {str(model.tokenize(likely)[0]): 30},
        "reasoning_effort": "none",
    }
    told = ask(tool_client, **bound)
    if likely == "{":
        assert json.loads(told["message"]["content"]) == {"a": 1}
        assert told["finish_reason"] == "stop"
    else:
        [call] = told["message"]["tool_calls"]
        assert_weather(call)
        assert told["finish_reason"] == "tool_calls"


def test_templates_get_their_variables(tool_client: httpx.Client) -> None:
    n = partial(n_prompt, tool_client, messages=user(QUESTION))
    thinking = n()
    assert n(chat_template_kwargs={"enable_thinking": False}) > thinking
    assert n(reasoning_effort="none") > thinking
    assert n(reasoning_effort="high") == thinking
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert n(**both) == thinking
