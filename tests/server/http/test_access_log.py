"""The log: a plain line for each request, and nothing of a prompt."""

import re

import httpx

from raw_http import exchange, raw
from server_process import ServerProcess


def test_the_log_has_a_plain_line_for_each_request(server: ServerProcess) -> None:
    begin = len(server.log)
    path = "/a%1b[31mred%0d%0aGET%20/forged?secret=prompt"
    assert exchange(server, raw(path, "Host: localhost"))[0] == 404
    line = server.wait_for("forged", after=begin).string
    assert re.fullmatch(
        r"127\.0\.0\.1 GET /a\\x1b\[31mred\\r\\nGET /forged 404 \d+ ms: there .*", line
    )
    assert not any("secret" in line for line in server.log[begin:])


def test_the_log_never_has_a_prompt(client: httpx.Client, server: ServerProcess) -> None:
    secret = "correct horse battery staple"
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
        for body in ({"prompt": secret}, {"prompt": {secret: secret}}, {secret: 1}):
            client.post(path, json=body)
    client.get(f"/health?prompt={secret}")
    client.get("/last-of-these")
    server.wait_for("/last-of-these")
    assert not any("horse" in line for line in server.log)


def test_the_log_says_why_a_request_was_refused(
    client: httpx.Client, server: ServerProcess
) -> None:
    for body, reason in (
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; give at least 1, or leave it out"),
        ({"prompt": "a", "temperature": "x"}, "temperature"),
        ({}, "prompt"),
    ):
        begin = len(server.log)
        assert client.post("/v1/completions", json=body).status_code == 400
        line = server.wait_for("POST /v1/completions 400", after=begin).string
        assert f" ms: {reason}" in line, line


def test_what_is_not_known_is_told_once(client: httpx.Client, server: ServerProcess) -> None:
    begin = len(server.log)
    body = {"prompt": "a", "max_tokens": 1, "temprature": 0, "model": "gpt-x"}
    for _ in range(2):
        client.post("/v1/completions", json=body).raise_for_status()
    client.get("/last-of-both")
    server.wait_for("/last-of-both", after=begin)
    told = [line for line in server.log[begin:] if line.startswith("warning: ")]
    assert [line for line in told if "temprature; did you mean temperature?" in line] == told[1:]
    assert len(told) == 2 and "the model gpt-x" in told[0]


def test_the_log_tells_the_tokens(client: httpx.Client, server: ServerProcess) -> None:
    begin = len(server.log)
    body = {"prompt": "def fib(n):", "max_tokens": 5, "ignore_eos": True}
    usage = client.post("/v1/completions", json=body).json()["usage"]
    line = server.wait_for(r"POST /v1/completions 200 \d+ ms (\d+)\+5 tokens", after=begin)
    assert int(line[1]) == usage["prompt_tokens"]
