"""What goes wrong is told in the words of the API that a request is to, wherever it goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from chat_models import WEATHER
from openai_api import user
from server_process import EXACT, ServerProcess, serving

KEY = "a-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
MESSAGES = "/v1/messages"
QUESTION: dict[str, Any] = {"messages": user("Hi"), "max_tokens": 4}


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    """One slot, one that may wait for it a moment, and a key."""
    few = ("--parallel", "1", "--queue", "1", "--queue-timeout", "2")
    with serving(*EXACT, *few, "--api-key", KEY) as running:
        yield running


def openai(answer: httpx.Response, _kind: str) -> None:
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def anthropic(answer: httpx.Response, kind: str) -> None:
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["error"]["message"]


def ollama(answer: httpx.Response, _kind: str) -> None:
    assert set(answer.json()) == {"error"}
    assert isinstance(answer.json()["error"], str)
    assert answer.json()["error"]


ROUTES: list[tuple[str, Callable[[httpx.Response, str], None], dict[str, str]]] = [
    ("/v1/chat/completions", openai, {}),
    ("/v1/messages/count_tokens", anthropic, {}),
    (MESSAGES, anthropic, {}),
    ("/v1/models", anthropic, {"anthropic-version": "2023-06-01"}),
    ("/api/chat", ollama, {}),
    ("/api/tags", ollama, {}),
]


@pytest.mark.parametrize(("path", "told", "headers"), ROUTES, ids=lambda value: str(value)[:24])
def test_at_the_door(
    path: str,
    told: Callable[[httpx.Response, str], None],
    headers: dict[str, str],
    locked: ServerProcess,
) -> None:
    known = {**headers, **BEARER}
    json_type = {"Content-Type": "application/json"}

    def check(status: int, kind: str, method: str = "POST", **more: Any) -> None:
        with locked.client() as client:
            answer = client.request(method, path, **more)
        assert answer.status_code == status, answer.text
        told(answer, kind)

    check(401, "authentication_error", headers=headers)
    check(401, "authentication_error", headers={**headers, "x-api-key": "wrong"})
    check(403, "permission_error", headers={**known, "Host": "evil.example"})
    check(403, "permission_error", headers={**known, "Origin": "https://evil.example"})
    check(415, "invalid_request_error", headers=known, content=b"{}")
    check(400, "invalid_request_error", headers={**known, **json_type}, content=b"{")
    too_much = b"[" + b"1," * (4 << 20) + b"1]"
    check(413, "request_too_large", headers={**known, **json_type}, content=too_much)
    check(405, "invalid_request_error", "PATCH", headers=known)


@pytest.mark.parametrize(
    ("path", "told", "headers"),
    [
        ("/v1/messages/batches", anthropic, {}),
        ("/v1/files", anthropic, {"anthropic-version": "2023-06-01"}),
        ("/v1/messagesque", openai, {}),
        ("/api/pull", ollama, {}),
        ("/apiary", openai, {}),
    ],
)
def test_a_route_that_there_is_not(
    path: str,
    told: Callable[[httpx.Response, str], None],
    headers: dict[str, str],
    client: httpx.Client,
) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == 404
    told(answer, "not_found_error")


def test_keys_are_taken_as_each_client_sends_them(locked: ServerProcess) -> None:
    with locked.client() as client:
        for key in (BEARER, {"x-api-key": KEY}):
            for path in ("/v1/messages/count_tokens", "/api/show"):
                body = {**QUESTION, "model": "tiny-coder-q8_0"}
                assert client.post(path, json=body, headers=key).status_code == 200


@pytest.mark.parametrize(("path", "told"), [(MESSAGES, anthropic), ("/api/chat", ollama)])
def test_a_full_queue_and_a_turn_that_does_not_come(
    path: str, told: Callable[[httpx.Response, str], None], locked: ServerProcess
) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with locked.client(headers=BEARER) as client:
            answers.append(client.post(path, json=QUESTION))

    endless = {"messages": user("Count"), "stream": True, "ignore_eos": True}
    with (
        locked.client(headers=BEARER) as client,
        client.stream("POST", "/v1/chat/completions", json=endless) as running,
    ):
        chunks = running.iter_raw()
        next(chunks)
        waiting = [threading.Thread(target=ask) for _ in range(2)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
    full, late = sorted(answers, key=lambda answer: answer.status_code)
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    told(full, "rate_limit_error")
    assert late.status_code == (529 if path == MESSAGES else 503)
    told(late, "overloaded_error")


# Bodies.

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


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
        ("messages", [{"role": "user", "content": [IMAGE]}], "type image"),
        ("messages", [{"role": "user", "content": [{"type": "document"}]}], "type document"),
        ("messages", [{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        (
            "messages",
            [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}],
                }
            ],
            "messages[0].content[0].content[0]",
        ),
        ("messages", [{"role": "assistant", "content": [IMAGE]}], "type image"),
        ("system", [IMAGE], "type image"),
        ("temperature", 3, "temperature"),
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
def test_what_messages_refuse_is_named(
    client: httpx.Client, field: str, value: object, named: str
) -> None:
    body = {**QUESTION, field: value}
    if value is None:
        del body[field]
    answer = client.post(MESSAGES, json=body)
    assert answer.status_code == 400, answer.text
    anthropic(answer, "invalid_request_error")
    message = answer.json()["error"]["message"]
    assert named in message
    assert len(message) < 400


def test_only_free_text_can_be_begun(tool_client: httpx.Client) -> None:
    begun = [*user("Hi"), {"role": "assistant", "content": "{"}]
    forced = {
        "tools": [{"name": "a", "input_schema": WEATHER["function"]["parameters"]}],
        "tool_choice": {"type": "any"},
    }
    answer = tool_client.post(MESSAGES, json={"messages": begun, "max_tokens": 4, **forced})
    assert answer.status_code == 400
    anthropic(answer, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": user("x"), "format": "xml"}, "format"),
        ("/api/chat", {"messages": user("x"), "think": "hard"}, "think"),
        ("/api/chat", {"messages": user("x"), "logprobs": True}, "logprobs"),
        ("/api/chat", {"messages": user("x"), "options": {"num_predict": 0}}, "num_predict"),
        ("/api/chat", {"messages": user("x"), "options": {"top_p": 2}}, "options.top_p"),
        ("/api/chat", {"messages": user("x"), "options": {"stop": 5}}, "options.stop"),
        ("/api/chat", {"messages": user("x"), "tools": [{"function": {}}]}, "tools[0]"),
        (
            "/api/chat",
            {"messages": user("x"), "tools": [WEATHER], "format": "json"},
            "tools need it free",
        ),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context"),
        ("/api/generate", {"prompt": "x", "images": ["x"]}, "images"),
        ("/api/generate", {"prompt": 5}, "prompt"),
    ],
)
def test_what_ollama_s_routes_refuse_is_named(
    tool_client: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    answer = tool_client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    ollama(answer, "")
    assert named in answer.json()["error"]
    assert len(answer.json()["error"]) < 400


def test_openapi_tells_which_error_a_route_has(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()

    def error_of(path: str) -> dict[str, Any]:
        told = described["paths"][path]["post"]["responses"]["4XX"]["content"]
        name = told["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        schema: dict[str, Any] = described["components"]["schemas"][name]["properties"]
        return schema

    assert set(error_of(MESSAGES)) == {"type", "error"}
    assert error_of("/api/chat")["error"]["type"] == "string"
    assert "$ref" in json.dumps(error_of("/v1/chat/completions"))
