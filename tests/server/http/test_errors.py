"""Errors in OpenAI's form: one line, a status that says whose fault it is, no traceback."""

import httpx
import pytest

from openai_api import error_of
from server_process import ServerProcess

GENERATING = ["/v1/chat/completions", "/v1/completions", "/completion", "/infill"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "path", ["/page", "/v1", "/v1/", "/docs/", "/redoc", "/v1/nothing", "/%00", "//"]
)
def test_a_route_that_there_is_not(client: httpx.Client, server: ServerProcess, path: str) -> None:
    for method in ("GET", "POST"):
        assert error_of(client.request(method, server.url + path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", path) for path in GENERATING]
    + [("POST", "/v1/models"), ("DELETE", "/health"), ("PUT", "/props"), ("PATCH", "/metrics")],
)
def test_a_method_that_the_route_does_not_take(
    client: httpx.Client, method: str, path: str
) -> None:
    answer = client.request(method, path)
    assert answer.headers["allow"]
    assert error_of(answer, 405)["code"] == "method_not_allowed"


def test_methods_that_nobody_knows(client: httpx.Client) -> None:
    assert client.request("BREW", "/health").status_code == 405
    assert client.request("BREW", "/coffee").status_code == 404


@pytest.mark.one_in(24)
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("body", ["", "null", "[]", "1", '"text"', "true"], ids=repr)
def test_a_body_that_is_no_object(client: httpx.Client, path: str, body: str) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert error_of(answer)["type"] == "invalid_request_error"


def test_a_number_beyond_all_numbers(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    body = b'{"prompt": "x", "temperature": 1e999}'
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 400


def test_a_prompt_that_does_not_fit_gets_the_numbers(client: httpx.Client) -> None:
    n_ctx = client.get("/props").json()["default_generation_settings"]["n_ctx"]
    answer = client.post("/v1/completions", json={"prompt": "word " * 2 * n_ctx, "max_tokens": 1})
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert told["code"] == "context_length_exceeded"
    n = told["n_prompt_tokens"]
    assert n > told["n_ctx"] == n_ctx
    # What agents look for, and read the numbers from.
    assert f"request ({n} tokens) exceeds the available context size ({n_ctx} " in told["message"]
    assert told["type"] == "exceed_context_size_error"
