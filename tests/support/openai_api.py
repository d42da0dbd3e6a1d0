"""Shared by tests of OpenAI's routes: requests, refusals, and the events of a stream.

Unless a test says otherwise, prompts are computed anew. A part of one that was computed beside
other requests may differ from it in the last bits, and answers where the target is undecided.
"""

import json
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
QUESTION = "Write a function that adds two numbers"
CERTAIN = 4
"""So many tokens of the answer to that question are certain, whoever else is answered with it."""

SAMPLER = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""The server's sampling if a request says nothing."""


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    """The answer's JSON."""
    answer = client.post(path, json={"cache_prompt": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused for what is in it."""
    error = error_of(client.post(path, json=body))
    assert error["type"] == "invalid_request_error"
    return error


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, whose shape is always the same."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 400
    assert "Traceback" not in error["message"]
    return error


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends as it should."""
    answer = client.post(path, json={"cache_prompt": False, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no" and "content-length" not in answer.headers
    *blocks, end = answer.text.split("\n\n")
    assert end == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(text) for text in data]


def ask(client: httpx.Client, text: str = QUESTION, **body: Any) -> Any:
    """A chat of one question."""
    return post(client, CHAT, messages=user(text), **body)
