"""What careless and hostile clients send is refused at once, in one line, and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import string
from typing import Any

import httpx
import pytest

from dflash_local import GrammarError, Model
from dflash_local.sampling import grammar as grammar_module
from server_process import ServerProcess

MEGABYTE = 1 << 20
JSON = {"Content-Type": "application/json"}


def refused(answer: httpx.Response, status: int, said: str) -> None:
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"] and "\n" not in error["message"]
    assert len(error["message"]) < 400


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MEGABYTE + b"[]]",
        b'{"prompt": "a", "x": [' + b"{}," * MEGABYTE + b"{}]}",
        b'{"prompt": [' + b"0," * MEGABYTE + b"0]}",
        b'{"prompt": "a", "x": [' + b'"",' * MEGABYTE + b'""]}',
        b'{"prompt": "\\"", "x": [' + b'"\\\\",' * MEGABYTE + b'""]}',
    ],
    ids=["lists", "objects", "ids", "texts", "escapes"],
)
def test_more_values_than_any_request_has(client: httpx.Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/completion"):
        refused(client.post(path, content=body, headers=JSON), 413, "values")


def test_marks_within_a_text_are_no_values(client: httpx.Client) -> None:
    text = '[{,"\\' * 100_000
    answer = client.post("/tokenize", content=json.dumps({"content": text}), headers=JSON)
    assert len(answer.json()["tokens"]) > 1000


def test_arguments_too_long_to_be_parsed(client: httpx.Client) -> None:
    call = {"function": {"name": "f", "arguments": "[" + "[]," * MEGABYTE + "[]]"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    refused(answer, 400, "arguments")


# Texts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 7 * MEGABYTE}),
        ("/v1/completions", {"prompt": "a", "suffix": "a" * 7 * MEGABYTE}),
        ("/completion", {"prompt": ["a" * 7 * MEGABYTE, 5]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 7 * MEGABYTE}], "stream": True},
        ),
        ("/v1/responses", {"input": "a" * 7 * MEGABYTE}),
    ],
    ids=["prompt", "suffix", "mixed", "chat", "responses"],
)
def test_a_text_that_cannot_fit_is_not_tokenised(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = client.post(path, json=body)
    refused(answer, 400, "at least")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_gap_in_a_long_file_is_filled(client: httpx.Client) -> None:
    file = "def f(x):\n    return x\n\n\n" * 80_000
    body = {"input_prefix": file, "input_suffix": file, "n_predict": 4}
    body |= {"input_extra": [{"text": file, "filename": "long.py"}]}
    answer = client.post("/infill", json=body)
    assert answer.status_code == 200
    assert answer.json()["tokens_predicted"] > 0


def test_pieces_of_a_long_text(client: httpx.Client) -> None:
    body = {"content": "a b " * 100_000, "with_pieces": True}
    refused(client.post("/tokenize", json=body), 400, "with_pieces")
    n = len(client.post("/tokenize", json={**body, "with_pieces": False}).json()["tokens"])
    assert n > 100_000


# Grammars


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= (("a"|"")("b"|"")){0,50} "z"',
        'root ::= x{2,40}\nx ::= "a"?',
        "root ::= (x x x x x x x x)+\nx ::= [a-z ]? y\ny ::= [a-z ]? z\nz ::= [a-z ]?",
    ],
)
def test_an_ambiguous_grammar_holds_nobody_up(client: httpx.Client, grammar: str) -> None:
    body = {"prompt": "a", "grammar": grammar, "n_predict": 16, "seed": 1}
    answer = client.post("/completion", json=body)
    assert answer.status_code == 200
    assert set(answer.json()["content"]) <= set(string.ascii_lowercase + " ")


def test_nobody_waits_for_grammars_of_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LONGEST_TRIAL_S", 1.0)

    def endless(salt: int) -> dict[str, Any]:
        patterns = [{"type": "string", "pattern": f".*{salt}x{i}.*"} for i in range(24)]
        return {"allOf": patterns}

    async def run() -> int:
        first = asyncio.ensure_future(model.agenerate("def", max_tokens=2, json_schema=endless(0)))
        others = [
            asyncio.ensure_future(model.agenerate("def", max_tokens=2, json_schema=endless(i)))
            for i in range(1, 40)
        ]
        await asyncio.sleep(0)  # they have asked
        assert (await model.agenerate("def", max_tokens=2)).tokens
        left = sum(not task.done() for task in others)
        for task in others:
            task.cancel()
        with pytest.raises(GrammarError, match="simplify"):
            await first
        await asyncio.gather(*others, return_exceptions=True)
        return left

    assert asyncio.run(run()) > 30


def test_the_server_is_as_before_after_all_of_this(
    client: httpx.Client, server: ServerProcess
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "def f(x):", "max_tokens": 4})
    assert answer.status_code == 200
    assert not any(slot["is_processing"] for slot in client.get("/slots").json())
    assert not any("Traceback" in line for line in server.log)
