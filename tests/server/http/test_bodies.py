"""Bodies of careless and hostile clients are refused at once, in one line, and delay nobody."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections import defaultdict
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from dflash_local.server.http.bodies import BodyCheck
from dflash_local.server.http.errors import ApiError
from dflash_local.server.http.settings import ServerSettings
from openai_api import CHAT, error_of, refused
from raw_http import exchange, message, posted
from server_process import ServerProcess

MEGABYTE = 1 << 20
JSON = {"Content-Type": "application/json"}


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
        answer = client.post(path, content=body, headers=JSON)
        assert "values" in error_of(answer, 413)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"[[1]" + b",[1]" * 140_000 + b"]}",
        json.dumps({"prompt": "a", "logit_bias": dict.fromkeys(range(140_000), 1)}).encode(),
    ],
    ids=["lists", "fields"],
)
def test_more_parts_than_any_request_has(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/completion", content=body, headers=JSON)
    assert "fields" in error_of(answer, 413)["message"]


def test_a_byte_order_mark_is_no_part_of_a_body(client: httpx.Client) -> None:
    body = "\ufeff" + json.dumps({"content": "a"})
    answer = client.post("/tokenize", content=body.encode(), headers=JSON)
    assert answer.json() == client.post("/tokenize", json={"content": "a"}).json()


def test_a_body_that_is_compressed_is_refused_by_that_name(client: httpx.Client) -> None:
    body = gzip.compress(b'{"content": "a"}')
    answer = client.post("/tokenize", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert "'gzip'" in error_of(answer, 415)["message"]


def test_a_conversation_may_be_as_long_as_a_model_can_read(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x:[{,"}] * 9_999
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_marks_within_a_text_are_no_values(client: httpx.Client) -> None:
    text = '[{,"\\' * 100_000
    answer = client.post("/tokenize", content=json.dumps({"content": text}), headers=JSON)
    assert len(answer.json()["tokens"]) > 1000


def test_arguments_too_long_to_be_parsed(client: httpx.Client) -> None:
    call = {"function": {"name": "f", "arguments": "[" + "[]," * MEGABYTE + "[]]"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert "arguments" in refused(client, CHAT, messages=messages)["message"]


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
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"]
    assert "at least" in error["message"] and len(error["message"]) < 400


def test_large_bodies_are_refused_before_they_are_read(server: ServerProcess) -> None:
    status, body = exchange(server, posted("/v1/completions", b"", length=99999999999))
    assert status == 413
    assert "bytes" in message(body)


def test_large_bodies_of_unknown_length_are_refused(server: ServerProcess) -> None:
    head = ["Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    start = "\r\n".join(["POST /v1/completions HTTP/1.1", *head, "", ""]).encode()
    megabyte = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # the server stops reading
            connection.sendall(start)
            for _ in range(64):
                connection.sendall(megabyte)
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(65536)
    # What comes after a connection was closed may overtake the answer.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"prompt": ' * 5000 + b"1" + b"}" * 5000, "recursion"),
        (b'{"temperature": NaN}', "JSON"),
        (b'{"temperature": -Infinity}', "JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"prompt": "x"', "JSON"),
        (b"prompt=x", "JSON"),
    ],
    ids=range(9),
)
def test_bodies_that_are_no_json(client: httpx.Client, body: bytes, said: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models"):
        assert said in error_of(client.post(path, content=body, headers=JSON))["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types_are_refused(client: httpx.Client, kind: str | None) -> None:
    # A page of another origin could send these without being asked about first.
    headers = {"Content-Type": kind} if kind else {}
    answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert "application/json" in error_of(answer, 415)["message"]


def test_a_body_of_two_lengths(server: ServerProcess) -> None:
    """A proxy that believes the other one sees other requests than this server does."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = posted("/v1/completions", b"", "Transfer-Encoding: chunked", length=len(body))
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status, answer = exchange(server, head + chunked + smuggled)
    assert status == 400
    assert "both Content-Length and Transfer-Encoding" in message(answer)
    assert answer.count(b"HTTP/1.1") == 0  # the connection is closed


class _Large:
    """A check of bodies before an app that answers once it may, asked with large bodies."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        """The megabytes of the requests that the app got."""
        self.may_end: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._check = BodyCheck(self._answer, ServerSettings(max_body=40 * MEGABYTE))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(len((await receive())["body"]) // MEGABYTE)
        await self.may_end[self.begun[-1]].wait()

    async def has_begun(self, n: int) -> None:
        while len(self.begun) < n:
            await asyncio.sleep(0.01)

    def ask(self, megabytes: int, leaves: asyncio.Event) -> asyncio.Task[None]:
        """A client that sends a body, and then leaves or waits."""
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await leaves.wait()
                return {"type": "http.disconnect"}
            sent = True
            return {"type": "http.request", "body": b'"' + b"x" * (megabytes * MEGABYTE) + b'"'}

        async def send(_: Any) -> None:
            raise AssertionError("nothing is answered")

        head = [(name.lower().encode(), value.encode()) for name, value in JSON.items()]
        scope = {"type": "http", "path": "/v1/x", "headers": head}
        return asyncio.ensure_future(self._check(scope, receive, send))


def test_who_leaves_while_its_large_body_waits_gives_up_its_place() -> None:
    async def run() -> None:
        large, leaves, stays = _Large(), asyncio.Event(), asyncio.Event()
        first = large.ask(20, stays)
        await large.has_begun(1)
        second, third = large.ask(20, leaves), large.ask(8, stays)
        leaves.set()
        await second
        await large.has_begun(2)
        assert not first.done() and not third.done()
        large.may_end[20].set()
        large.may_end[8].set()
        await asyncio.gather(first, third)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_large_bodies_that_wait_are_bound_and_refused_beyond() -> None:
    async def run() -> None:
        large, stays = _Large(), asyncio.Event()
        asked = [large.ask(20, stays)]
        await large.has_begun(1)
        asked += [large.ask(20, stays) for _ in range(7)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert large.begun == [20] and len(waiting) == 7
        (refused,) = done
        error = refused.exception()
        assert isinstance(error, ApiError) and error.status == 503
        assert "wait already, 120 MiB in all; send this one again later" in error.message
        large.may_end[20].set()
        await asyncio.gather(*waiting)
        assert large.begun == [20] * 7

    asyncio.run(asyncio.wait_for(run(), 60))


def test_large_bodies_are_answered_in_the_order_in_which_they_came() -> None:
    """A later one that would fit beside those in work does not overtake one that waits."""

    async def run() -> None:
        large, stays = _Large(), asyncio.Event()
        asked = [large.ask(megabytes, stays) for megabytes in (20, 24, 8)]
        await large.has_begun(1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert large.begun == [20]
        large.may_end[20].set()
        await asked[0]
        for megabytes in (24, 8):
            large.may_end[megabytes].set()
        await asyncio.gather(*asked)
        assert large.begun == [20, 24, 8]

    asyncio.run(asyncio.wait_for(run(), 60))
