"""Errors in OpenAI's form: one line, a status that says whose fault it is, no traceback."""

from typing import Any

import httpx
import pytest

from server_process import ServerProcess

GENERATING = ["/v1/chat/completions", "/v1/completions", "/completion", "/infill"]


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose shape is always the same."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    told: dict[str, Any] = body["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert told["message"] and "\n" not in told["message"]
    assert "Traceback" not in told["message"]
    return told


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    "path", ["/page", "/v1", "/v1/", "/docs/", "/redoc", "/v1/nothing", "/%00", "//"]
)
def test_a_route_that_there_is_not(client: httpx.Client, server: ServerProcess, path: str) -> None:
    for method in ("GET", "POST"):
        answer = client.request(method, server.url + path)
        assert answer.status_code == 404
        assert error(answer)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", path) for path in GENERATING]
    + [("POST", "/v1/models"), ("DELETE", "/health"), ("PUT", "/props"), ("PATCH", "/metrics")],
)
def test_a_method_that_the_route_does_not_take(
    client: httpx.Client, method: str, path: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"]
    assert error(answer)["code"] == "method_not_allowed"


def test_methods_that_nobody_knows(client: httpx.Client) -> None:
    assert client.request("BREW", "/health").status_code == 405
    assert client.request("BREW", "/coffee").status_code == 404


@pytest.mark.one_in(24)
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("body", ["", "null", "[]", "1", '"text"', "true"], ids=repr)
def test_a_body_that_is_no_object(client: httpx.Client, path: str, body: str) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert error(answer)["type"] == "invalid_request_error"


@pytest.mark.one_in(30)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -2, 1.5, "5", True, 2**31, 10**30)),
        *(("temperature", value) for value in (-0.1, 101, "1", "hot")),
        *(("top_p", value) for value in (1.1, -1)),
        *(("n", value) for value in (0, 1000, True)),
        *(("seed", value) for value in (1.5, 10**30)),
        *(("stop", value) for value in (5, [""], ["x"] * 1000, ["x" * 100_000])),
        *(("presence_penalty", 3), ("frequency_penalty", -3), ("stream", "yes")),
        *(("logit_bias", {key: bias}) for key, bias in (("1", 1000), ("x" * 300, 1), ("a", "b"))),
        *(("logit_bias", {"99999999": 1}), ("logit_bias", [1])),
    ],
)
def test_a_value_out_of_bounds_is_named(client: httpx.Client, field: str, value: object) -> None:
    bodies = {
        "/v1/completions": {"prompt": "x", field: value},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], field: value},
    }
    for path, body in bodies.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        told = error(answer)
        assert field in told["message"]
        assert len(told["message"]) < 400


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
