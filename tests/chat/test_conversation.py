"""Messages of clients get the shape that chat templates expect, or are refused in one line."""

from typing import Any

import pytest

from chat_models import CALL, CALLED, HELLO
from dflash_local.chat.conversation import complete_fields, conversation
from dflash_local.errors import InputError

REASONS = "{# reasoning_content #}"
"""A template that shows reasoning."""


def said(**message: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", **message}]


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        *(([], "empty"), (None, "null"), ("Hello", "of type str"), (HELLO[0], "of type dict")),
        (["Hello"], "message 0 is of type str"),
        ([*HELLO, {"content": "x"}], "message 1: role is missing"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content is null"),
        ([{"role": 3, "content": "x"}], "role is of type int"),
        (said(content=[{"type": "image_url", "image_url": {}}]), "part 0 is of type 'image_url'"),
        (said(content=[{"type": "text"}]), "part 0: text is missing"),
        (said(content=["a"]), "part 0 is not an object with a type"),
        (said(content=[]), "content is empty"),
        (said(content="x", reasoning_content=3), "reasoning_content is of type int"),
        (said(tool_calls="f"), "tool_calls are of type str"),
        (said(tool_calls=[{}]), "tool call 0 names no function"),
        (said(tool_calls=[{"function": {"name": 3}}]), "name is of type int"),
        (said(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "are of type list"),
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any, part: str) -> None:
    with pytest.raises(InputError, match=part) as caught:
        conversation(messages, "")
    assert "\n" not in str(caught.value)


def arguments_of(call: dict[str, Any]) -> Any:
    """What a template is given of a call's arguments."""
    message = conversation(said(tool_calls=[call]), "")[1]
    return message["tool_calls"][0]["function"]["arguments"]


def test_messages_are_brought_into_the_shape_of_templates() -> None:
    call, answer = conversation(CALLED, REASONS)[1:3]
    assert call["content"] == "" and call["reasoning_content"] == "Hm."
    assert call["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert answer == {**CALLED[2], "name": "get_weather"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation([{"role": "user", "content": parts, "name": None}], "") == [
        {"role": "user", "content": "a\nb"}
    ]
    assert arguments_of({**CALL, "function": {"name": "now", "arguments": ""}}) == {}
    assert "tool_calls" not in conversation([{**HELLO[0], "tool_calls": []}], "")[0]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [('{"city":', {}), ('{"city": "Paris", "da', {"city": "Paris"}), ("{", {}), ("Paris", {})],
)
def test_a_call_that_was_cut_off_keeps_its_complete_fields(
    arguments: str, fields: dict[str, str]
) -> None:
    function = {"name": "get_weather", "arguments": arguments}
    assert arguments_of({**CALL, "function": function}) == fields


def test_arguments_keep_what_only_pythons_json_reads() -> None:
    call = {**CALL, "function": {"name": "log", "arguments": '{"text": "\\ud83d", "n": Infinity}'}}
    assert arguments_of(call) == {"text": "\ud83d", "n": float("inf")}
    assert complete_fields("[1]") == complete_fields('"text"') == {}


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert conversation(messages, "")[0]["role"] == "system"
    assert conversation(messages, "{# developer #}")[0]["role"] == "developer"


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_asks_for(given: str) -> None:
    messages = said(content="Hi", **{given: "Hm."})
    assert conversation(messages, REASONS)[1]["reasoning_content"] == "Hm."
    plain = {"role": "assistant", "content": "Hi"}
    assert conversation(messages, "{# thinking #}")[1] == {**plain, "thinking": "Hm."}
    assert conversation(messages, "")[1] == plain
