"""Wherever something goes wrong, the error has the form of the API that the request went to."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from guarded_server import BEARER
from openai_api import user
from server_process import ServerProcess, until

MESSAGES = "/v1/messages"
QUESTION: dict[str, Any] = {"messages": user("Hi"), "max_tokens": 4}
ENDLESS = {"messages": user("Count"), "stream": True, "ignore_eos": True}


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


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("path", "told", "headers"),
    ROUTES,
    ids=lambda value: getattr(value, "__name__", str(value)[:24]),
)
def test_at_the_door(
    path: str,
    told: Callable[[httpx.Response, str], None],
    headers: dict[str, str],
    guarded: ServerProcess,
) -> None:
    known = {**headers, **BEARER}
    json_type = {"Content-Type": "application/json"}

    def check(status: int, kind: str, method: str = "POST", **more: Any) -> None:
        with guarded.client() as client:
            answer = client.request(method, path, **more)
        assert answer.status_code == status, answer.text
        told(answer, kind)

    check(401, "authentication_error", headers=headers)
    check(401, "authentication_error", headers={**headers, "x-api-key": "wrong"})
    check(403, "permission_error", headers={**known, "Host": "evil.example"})
    check(403, "permission_error", headers={**known, "Origin": "https://evil.example"})
    untyped = 400 if told is ollama else 415  # Ollama's clients send no content type
    check(untyped, "invalid_request_error", headers=known, content=b"{")
    check(400, "invalid_request_error", headers={**known, **json_type}, content=b"{")
    too_much = b"[" + b"1," * (4 << 20) + b"1]"
    check(413, "request_too_large", headers={**known, **json_type}, content=too_much)
    check(405, "invalid_request_error", "PATCH", headers=known)


@pytest.mark.parametrize(
    ("path", "told", "headers"),
    [
        ("/v1/files", anthropic, {"anthropic-version": "2023-06-01"}),
        *(("/v1/messages/batches", anthropic, {}), ("/api/create", ollama, {})),
        *(("/v1/messagesque", openai, {}), ("/apiary", openai, {})),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "told"),
    [("/v1/chat/completions", openai), (MESSAGES, anthropic), ("/api/chat", ollama)],
)
def test_a_full_queue_and_a_turn_that_does_not_come(
    path: str, told: Callable[[httpx.Response, str], None], guarded: ServerProcess
) -> None:
    def ask() -> httpx.Response:
        with guarded.client(headers=BEARER) as client:
            return client.post(path, json={**QUESTION, "stream": True})

    with (
        guarded.client(headers=BEARER) as client,
        ThreadPoolExecutor() as pool,
        client.stream("POST", "/v1/chat/completions", json=ENDLESS) as running,
        guarded.client(headers=BEARER) as other,
    ):
        lines = running.iter_lines()  # kept: without it the stream would be closed
        next(lines)
        waiting = pool.submit(ask)
        until(lambda: "llamacpp:requests_deferred 1.0" in other.get("/metrics").text)
        # At once, as the one that waits does so for two seconds.
        full = other.post(path, json={**QUESTION, "stream": True})
        late = waiting.result()
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    told(full, "rate_limit_error")
    assert late.status_code == (529 if path == MESSAGES else 503)
    told(late, "overloaded_error")
    if told is openai:
        codes = [answer.json()["error"]["code"] for answer in (full, late)]
        assert codes == ["queue_full", "queue_timeout"]


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
