"""Refusals of `/v1/chat/completions`: 400, the field, and a line that says why."""

from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from dflash_local.server.openai.chat import AssistantMessage, PlainMessage, ToolMessage
from dflash_local.server.openai.responses import FunctionCallOutput, InputMessage
from openai_api import CHAT, refused, user

REGEX = {"structured_outputs": {"regex": "a"}}


def parts(*given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*user("a"), {"role": "user", "content": list(given)}]}


@pytest.mark.one_in(31)
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": None}, "messages", "list"),
        ({"messages": [{"role": 3, "content": "a"}]}, "messages[0].role", "string"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (parts({"type": "image_url"}), "messages[1].content[0].image_url", "required"),
        (parts({"type": "input_audio"}), "messages[1].content[0]", "input_audio"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities", "text"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        ({"mirostat": 2}, "mirostat", "no such setting"),
        ({"min_tokens": -4}, "min_tokens", "0"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids[0]", "integer"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "boolean"),
        ({"typical_p": 2.0}, "typical_p", "1"),
        ({"n_probs": 101}, "n_probs", "100"),
        ({"guided_choice": []}, "choice", "1"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "both"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.struc", "None"),
        ({**REGEX, "response_format": {"type": "json_object"}}, "structured_outputs", "give one"),
        ({"tools": [{"type": "custom"}]}, "tools[0]", "custom"),
    ],
)
def test_what_is_refused(
    client: httpx.Client, body: dict[str, Any], param: str, words: str
) -> None:
    error = refused(client, CHAT, **{"messages": user("hi"), **body})
    assert error["param"].startswith(param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (ToolMessage, {"role": "tool", "tool_call_id": "c1"}, "content"),
        (AssistantMessage, {"role": "assistant"}, "content"),
        (PlainMessage, {"role": "user"}, "content"),
        (InputMessage, {"role": "assistant"}, "content"),
        (FunctionCallOutput, {"type": "function_call_output", "call_id": "c1"}, "output"),
    ],
)
def test_content_of_no_parts_is_an_empty_text(
    kind: type[BaseModel], given: dict[str, Any], field: str
) -> None:
    assert getattr(kind.model_validate({**given, field: []}), field) == ""


def test_a_schema_that_is_none_is_refused(client: httpx.Client) -> None:
    given = {"name": "x", "schema": {"type": "no such type"}}
    body = {"response_format": {"type": "json_schema", "json_schema": given}}
    assert "json_schema" in refused(client, CHAT, messages=user("hi"), **body)["message"]


def test_a_call_that_the_model_cannot_make_is_refused(client: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refused(client, CHAT, messages=user("hi"), tools=tools, tool_choice="required")
    assert error["param"] == "tool_choice"
    assert "no tool calls" in error["message"]


def test_what_is_wrong_with_a_stream_is_told_before_it_begins(client: httpx.Client) -> None:
    error = refused(
        client, CHAT, messages=user("hi"), stream=True, grammar="no grammar", max_tokens=4
    )
    assert "grammar" in error["message"]
