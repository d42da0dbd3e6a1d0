"""Refusals of Ollama's routes: 400, the field, and a line that says why."""

from typing import Any

import httpx
import pytest

from openai_api import user


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "image input"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": user("x"), "format": "xml"}, "format"),
        ("/api/chat", {"messages": user("x"), "think": "hard"}, "think"),
        ("/api/chat", {"messages": user("x"), "logprobs": 1}, "logprobs"),
        ("/api/chat", {"messages": user("x"), "options": {"num_predict": 0}}, "num_predict"),
        ("/api/chat", {"messages": user("x"), "options": {"top_p": 2}}, "options.top_p"),
        ("/api/chat", {"messages": user("x"), "options": {"stop": 5}}, "options.stop"),
        ("/api/chat", {"messages": user("x"), "tools": [{"function": {}}]}, "tools[0]"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "context": [1, -2]}, "context"),
        ("/api/generate", {"prompt": "x", "images": ["x"]}, "image input"),
        ("/api/generate", {"prompt": 5}, "prompt"),
    ],
)
def test_what_is_refused_is_named(
    tool_client: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    answer = tool_client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]
    assert named in message and len(message) < 400
