"""Hostile requests, all at once: none stops the event loop, or the answers to others."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import gguf_files
from dflash_local import demo
from server_process import EXACT, ServerProcess, serving
from stall_server import COMMAND

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if messages[0].content == 'hang' %}{% set a = namespace(x=[0], y=[0]) %}"
    "{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}"
    "{{ a.x == a.y }}{% elif messages[0].content == 'grow' %}{{ 'a' | center(10 ** 10) }}"
    "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
NAMES = "<|im_start|>" * 80_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(24)]}


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


ATTACKS: list[tuple[str, Any]] = [
    ("/tokenize", {"content": NAMES}),
    ("/tokenize", {"content": " " * (4 << 20)}),
    ("/tokenize", {"content": " " * (1 << 20)}),
    ("/tokenize", {"content": [-1] * 299_000}),
    ("/tokenize", {"content": ["a"] * 299_000}),
    ("/detokenize", {"tokens": [-1] * 299_000}),
    ("/detokenize", {"tokens": [1] * 299_000}),
    ("/completion", {"prompt": [-1] * 299_000}),
    ("/completion", {"prompt": [[1]] * 90_000}),
    ("/completion", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(99_000)}}),
    ("/completion", {"prompt": NAMES}),
    (COMPLETIONS, {"prompt": ["a", -1] * 140_000}),
    (COMPLETIONS, {"prompt": "a", "grammar": 'root ::= "a"\n' + "# x\n" * 1_000_000}),
    (COMPLETIONS, {"prompt": "a", "grammar": 'root ::= "a"\n' + "# x\n" * 60_000}),
    (COMPLETIONS, {"prompt": "a", "json_schema": SCHEMA, "max_tokens": 1}),
    (CHAT, {"messages": said("hang")}),
    (CHAT, {"messages": said("grow")}),
    (CHAT, {"messages": said(NAMES)}),
    (CHAT, {"messages": said("a"), "modalities": [-1] * 299_000}),
    (CHAT, {"messages": [{"role": "user"}] * 30_000}),
    (CHAT, {"messages": said("a") * 9_999}),
    (CHAT, {"messages": said("a"), "response_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("/v1/responses", {"input": [{"type": "message", "content": -1}] * 30_000}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{}]}] * 20_000}),
    ("/api/chat", {"model": "target", "messages": [{"role": "x", "content": -1}] * 30_000}),
    ("/infill", {"input_prefix": NAMES, "input_suffix": NAMES, "n_predict": 4}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("attacked") / "target.gguf"
    keys = {"tokenizer.chat_template": (TEMPLATE, gguf_files.STRING, None)}
    gguf_files.changed(demo.pair()[0], Path(path), keys=keys)
    files = ("--target", str(path), "--draft", str(demo.pair()[1]))
    with serving(*files, *EXACT, "--threads", "1", command=COMMAND) as running:
        yield running


def test_no_request_stops_the_others(server: ServerProcess) -> None:
    bodies = [(path, json.dumps(body).encode()) for path, body in ATTACKS]
    headers = {"Content-Type": "application/json"}
    waits: list[float] = []
    done = threading.Event()

    def attack(path: str, body: bytes) -> int:
        with server.client() as client:
            return client.post(path, content=body, headers=headers).status_code

    def watch() -> None:
        with server.client() as client:
            while not done.is_set():
                start = time.monotonic()
                client.get("/health").raise_for_status()
                waits.append(time.monotonic() - start)
                time.sleep(0.02)

    with ThreadPoolExecutor(9) as threads:
        watching = threads.submit(watch)
        try:
            statuses = list(threads.map(lambda each: attack(*each), bodies))
        finally:
            done.set()
        watching.result()
    stalls = [line for line in server.log if line.startswith("stalled")]
    print(f"{len(statuses)} requests, {len(waits)} polls, slowest {max(waits):.2f} s, {stalls}")
    assert {status for status in statuses if status >= 500} == set()
    assert not any("Traceback" in line for line in server.log)
    with server.client() as client:
        answer = client.post(CHAT, json={"messages": said("def f(x):"), "max_tokens": 4})
        answer.raise_for_status()
    assert stalls == []


def test_it_ends_at_once_in_the_middle_of_an_attack(server: ServerProcess) -> None:
    def attack(_: int) -> None:
        with server.client() as client, contextlib.suppress(httpx.HTTPError):
            client.post("/tokenize", json={"content": NAMES})

    with ThreadPoolExecutor(45) as threads:
        for i in range(45):
            threads.submit(attack, i)
        time.sleep(1)
        server.send(signal.SIGINT)
        start = time.monotonic()
        server.wait(60)
        assert time.monotonic() - start < 20
