"""Requests as editors and agents send them, replayed against a real server.

`editor_requests/` holds what each client sends: every field under its own name, prompts shortened
and a few of its tools kept. `version` and `source` say of what: clients that can be had from npm or
PyPI were run against this server and recorded, with the model bound to call a tool and to answer
then; requests of the others were put together from their sources. Each answer is read as that
client reads it, which is all that it needs; if a client sets no end to an answer, or a far one, the
replay does. Of a request that `adds` something to the one before it the file has only what differs:
the messages that are added, and fields with other values.
"""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_process import ServerProcess

FOLDER = Path(__file__).parent / "editor_requests"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "editors.md"


def recorded(path: Path) -> dict[str, Any]:
    """A client's file, with the whole body of each request."""
    client: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for before, request in pairwise(client["requests"]):
        if "adds" in request:
            body = {**before["body"], **request.get("body", {})}
            for field, more in request["adds"].items():
                body[field] = body[field] + more
            request["body"] = body
    return client


CLIENTS = {path.stem: recorded(path) for path in FOLDER.glob("*.json")}
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/api/chat": "num_predict",
}
MOST = 1000
FEW = 8
"""Tokens: enough to see how an answer is read."""
LIMIT_NAMES = (*LIMITS.values(), "max_completion_tokens", "n_predict")


def lines(answer: httpx.Response) -> list[str]:
    """The text of a stream's `data:` lines, as all of these clients read it: line by line."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line[5:].strip() for line in answer.text.split("\n") if line.startswith("data:")]


def until_done(answer: httpx.Response) -> list[dict[str, Any]]:
    *data, last = lines(answer)
    assert last == "[DONE]"
    chunks = [json.loads(text) for text in data]
    assert not any("error" in chunk for chunk in chunks)
    return chunks


def llama_vim_completion(answer: httpx.Response, body: Any) -> None:
    told = answer.json()
    assert set(told) == set(body["response_fields"])
    assert told["content"].strip()
    assert told["truncated"] is False
    assert told["tokens_cached"] >= 0
    assert all(told[field] >= 0 for field in told if field.startswith("timings/"))
    assert told["timings/predicted_n"] > 0
    _first, *others = told["content"].split("\n")
    assert all(line.startswith(" " * body["n_indent"]) for line in others if line)


def llama_vscode_completions(answer: httpx.Response, body: Any) -> None:
    told = answer.json()
    assert len(told) == body["n_cmpl"]
    assert all(isinstance(one["content"], str) for one in told)
    assert told[0]["content"].strip()
    names = {"prompt_n", "prompt_ms", "prompt_per_second"}
    names |= {"predicted_n", "predicted_ms", "predicted_per_second"}
    assert names <= told[0]["timings"].keys()


def llama_stream(answer: httpx.Response, _body: Any) -> None:
    told = [json.loads(text) for text in lines(answer)]
    assert "".join(event["content"] for event in told)
    assert [event["stop"] for event in told] == [False] * (len(told) - 1) + [True]


def completion_stream(answer: httpx.Response, _body: Any) -> None:
    chunks = until_done(answer)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def chat_stream(answer: httpx.Response, body: Any) -> None:
    chunks = until_done(answer)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    said = "".join(
        (choice["delta"].get("content") or "") + (choice["delta"].get("reasoning_content") or "")
        for choice in choices
    )
    assert said or any("tool_calls" in choice["delta"] for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(reasons) == 1
    assert reasons[0] in ("stop", "length", "tool_calls")
    if body.get("stream_options", {}).get("include_usage"):
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def responses_stream(answer: httpx.Response, _body: Any) -> None:
    events = [json.loads(text) for text in lines(answer)]
    said = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done
    assert "".join(said) == "".join(
        part["text"] for item in done if item["type"] == "message" for part in item["content"]
    )
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    usage = last["response"]["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0
    assert usage["output_tokens_details"]["reasoning_tokens"] >= 0


def message_stream(answer: httpx.Response, _body: Any) -> None:
    events = [json.loads(text) for text in lines(answer) if text != '{"type":"ping"}']
    first, *others, delta, stop = events
    assert first["message"]["usage"]["input_tokens"] > 0
    assert (first["type"], stop["type"]) == ("message_start", "message_stop")
    assert delta["type"] == "message_delta"
    assert delta["delta"]["stop_reason"] in ("end_turn", "max_tokens", "tool_use")
    assert delta["usage"]["output_tokens"] > 0
    marks = [event for event in others if event["type"] != "content_block_delta"]
    begun, ended = marks[::2], marks[1::2]
    assert {event["type"] for event in begun} == {"content_block_start"}
    assert [event["index"] for event in begun] == [event["index"] for event in ended]


def ollama_models(answer: httpx.Response, _body: Any) -> None:
    (model,) = answer.json()["models"]
    assert model["model"] == model["name"]
    assert model["details"]["family"]


def ollama_answer(answer: httpx.Response, _body: Any) -> None:
    told = answer.json()
    assert told["message"]["content"]
    assert told["done"]
    assert told["eval_duration"] > 0


def ollama_stream(answer: httpx.Response, _body: Any) -> None:
    assert answer.headers["content-type"] == "application/x-ndjson"
    told = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["eval_count"] > 0
    assert told[-1]["prompt_eval_count"] > 0


Read = Callable[[httpx.Response, Any], object]
SIMPLE: dict[str, Read] = {
    "there": lambda answer, _: answer.content == b"",
    "nothing": lambda answer, _: answer.json() == {},
    "anything": lambda answer, _: answer.json(),
    "health": lambda answer, _: answer.json()["status"] == "ok",
    "models": lambda answer, _: [bool(each["id"]) for each in answer.json()["data"]] == [True],
    "context": lambda answer, _: answer.json()["default_generation_settings"]["n_ctx"],
    "prompt": lambda answer, body: body["messages"][-1]["content"] in answer.json()["prompt"],
    "tokens": lambda answer, _: len(answer.json()["tokens"]) > 3,
    "completion": lambda answer, _: (
        answer.json()["id"] and answer.json()["choices"][0]["text"].strip()
    ),
    "chat": lambda answer, _: answer.json()["choices"][0]["message"]["content"],
    "count": lambda answer, _: answer.json()["input_tokens"],
    "ollama_version": lambda answer, _: re.fullmatch(r"\d+\.\d+\.\d+", answer.json()["version"]),
}
"""Those that look at one thing; for the others there is a function of that name above."""


def replay(server: ServerProcess, request: dict[str, Any]) -> httpx.Response:
    body = request.get("body")
    limit = LIMITS.get(request["path"].partition("?")[0])
    if limit:
        # Ollama's clients set it among the options.
        given = body.get("options", {}) if limit == "num_predict" else body
        if min((given[name] for name in LIMIT_NAMES if name in given), default=MOST) >= MOST:
            given = {**given, limit: FEW}
        body = {**body, "options": given} if limit == "num_predict" else given
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    headers |= request.get("headers", {})
    with server.client(headers=headers) as client:
        answer = client.request(request.get("method", "POST"), request["path"], json=body)
    assert answer.status_code == 200, answer.text
    reads = request["reads"]
    if reads in SIMPLE:
        assert SIMPLE[reads](answer, body), answer.text
    else:
        globals()[reads](answer, body)
    return answer


def prompt_tokens(answer: httpx.Response) -> tuple[int, int]:
    """Of how many tokens the prompt is, and how many of these were in the cache."""
    timings = json.loads(re.findall(r'"timings":({.*?})', answer.text)[-1])
    return timings["prompt_n"] + timings["cache_n"], timings["cache_n"]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_client_reads_what_it_needs(name: str, server: ServerProcess) -> None:
    """From the tiny pair, with which somebody tries an editor first."""
    for request in CLIENTS[name]["requests"]:
        replay(server, request)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", sorted(CLIENTS))
def test_a_client_reads_what_it_needs_of_a_model_with_tools(
    name: str, tool_server: ServerProcess
) -> None:
    """And what it sends after a call goes on from where it was: only what is new is computed."""
    asking = [
        {**request, "body": request["body"] | {"model": "tiny-tools"}}
        for request in CLIENTS[name]["requests"]
        if "tools" in request.get("body", {})
    ]
    answers = [replay(tool_server, request) for request in asking]
    for before, request, answer in zip(answers, asking[1:], answers[1:], strict=False):
        if "continues" in request:
            first, _ = prompt_tokens(before)
            whole, cached = prompt_tokens(answer)
            # Where an answer begins, a template may write otherwise than where it once began.
            assert first - 16 <= cached < whole, request["what"]


def test_the_page_names_the_clients_that_are_replayed() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {re.sub(r"[*`]|\[|\]\(.*?\)", "", row.split("|")[1]).strip() for row in rows[1:]}
    assert named - {"---", ""} == {client["client"].split(",")[0] for client in CLIENTS.values()}
