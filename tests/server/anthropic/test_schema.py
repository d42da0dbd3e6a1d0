"""Refusals of `/v1/messages`: 400, the field, and a line that says why."""

import httpx
import pytest

from openai_api import user

PATH = "/v1/messages"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}

AT_AN_ADDRESS = {"type": "image", "source": {"type": "url", "url": "http://x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


def blocks(*given: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(given)}]


@pytest.mark.one_in(27)
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("max_tokens", None, "max_tokens"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", "5", "max_tokens"),
        ("messages", None, "messages"),
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": "x"}], "user, assistant, system"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", blocks(IMAGE), "image input is not supported"),
        ("messages", blocks(AT_AN_ADDRESS), "nothing is fetched"),
        ("messages", blocks({"type": "document"}), "type document"),
        ("messages", blocks({"text": "x"}), "messages[0].content[0]"),
        ("messages", blocks({**RESULT, "content": [IMAGE]}), "image input is not supported"),
        ("messages", [{"role": "assistant", "content": [IMAGE]}], "type image"),
        ("system", [IMAGE], "type image"),
        ("temperature", -1, "temperature"),
        ("top_p", 2, "top_p"),
        ("top_k", 1.5, "top_k"),
        ("stop_sequences", "END", "stop_sequences"),
        ("stop_sequences", ["x"] * 1000, "stop_sequences"),
        ("tools", [{"name": "a b", "input_schema": {}}], "tools[0].name"),
        ("tools", [{"name": "a"}], "tools[0].input_schema"),
        ("tool_choice", {"type": "any"}, "tools"),
        ("tool_choice", {"type": "tool"}, "name"),
        ("tool_choice", {"type": "tool", "name": "a"}, "tools"),
        ("tool_choice", {"type": "some"}, "tool_choice"),
        ("thinking", {"type": "perhaps"}, "thinking"),
        ("output_config", {"effort": "most"}, "output_config"),
        ("stream", "yes", "stream"),
    ],
)
def test_what_is_refused_is_named(
    client: httpx.Client, field: str, value: object, named: str
) -> None:
    body: dict[str, object] = {"messages": user("Hi"), "max_tokens": 4, field: value}
    if value is None:
        del body[field]
    answer = client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    message = answer.json()["error"]["message"]
    assert named in message
    assert len(message) < 400
