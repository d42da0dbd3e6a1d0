"""Hostile requests, all at once, again and again: does any stop the others, or the event loop?

    python -m lab.server.attack --minutes 60

Eight clients send a server of tiny-coder, with a hostile chat template, requests that once
froze, starved or misled it; another one polls /health, and one asks for a plain answer now and
then. Needs the tests' packages. Prints its findings; exit code 1 if a request got an answer of
500 and up or none at all, the plain answer changed, the loop stalled, or there was a traceback.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

import httpx

import gguf_files
import tiny_coder
from lab.server import stall_server
from lab.server.resources import PATIENCE_S, Health
from server_process import EXACT, ServerProcess, serving

N_CLIENTS = 8
TEMPLATE = (
    "{% if messages[0].content == 'hang' %}{% set a = namespace(x=[0], y=[0]) %}"
    "{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}"
    "{{ a.x == a.y }}{% elif messages[0].content == 'grow' %}{{ 'a' | center(10 ** 10) }}"
    "{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
NAMES = "<|im_start|>" * 80_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(24)]}

PARAMETERS = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(80)}}
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "parameters": PARAMETERS}}
    for i in range(512)
]


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
    (CHAT, {"messages": said("a"), "tools": TOOLS}),
    (CHAT, {"messages": said("a"), "modalities": [-1] * 299_000}),
    (CHAT, {"messages": [{"role": "user"}] * 30_000}),
    (CHAT, {"messages": said("a") * 9_999}),
    (CHAT, {"messages": said("a"), "response_format": {"type": "json_schema", "schema": SCHEMA}}),
    ("/v1/responses", {"input": [{"type": "message", "content": -1}] * 30_000}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{}]}] * 20_000}),
    ("/api/chat", {"model": "target", "messages": [{"role": "x", "content": -1}] * 30_000}),
    ("/infill", {"input_prefix": NAMES, "input_suffix": NAMES, "n_predict": 4}),
]


@dataclass
class Found(Health):
    """The outcome of all that was sent."""

    rounds: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Attack:
    """Sends everything at once, in rounds."""

    def __init__(self, server: ServerProcess) -> None:
        self.found = Found()
        self._server = server
        self._bodies = [(path, json.dumps(body).encode()) for path, body in ATTACKS]

    def run(self, until: float) -> None:
        found = self.found
        with found.watching(self._server), ThreadPoolExecutor(N_CLIENTS) as clients:
            before = self._answer()
            while not found.rounds or time.monotonic() < until:
                list(clients.map(lambda each: self._send(*each), self._bodies))
                if self._answer() != before:
                    found.failures.append("the server's answers are not what they were")
                found.rounds += 1
                found.weigh(self._server.process.pid)

    def _send(self, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        try:
            with self._server.client() as client:
                answer = client.post(path, content=body, headers=headers, timeout=PATIENCE_S)
        except httpx.HTTPError as error:
            self.found.failures.append(f"{path}: {type(error).__name__}: {error}")
            return
        self.found.statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            self.found.failures.append(f"{path}: {answer.status_code} {answer.text[:300]}")

    def _answer(self) -> str:
        body = {"messages": said("def f(x):"), "max_tokens": 8, "temperature": 0}
        with self._server.client() as client:
            answer = client.post(CHAT, json=body, timeout=PATIENCE_S).raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long, at least one round")
    options = parser.parse_args()
    target, drafter = tiny_coder.pair()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "target.gguf"
        keys = {"tokenizer.chat_template": (TEMPLATE, gguf_files.STRING, None)}
        gguf_files.changed(target, path, keys=keys)
        files = ("--target", str(path), "--draft", str(drafter))
        with serving(*files, *EXACT, command=stall_server.COMMAND) as server:
            attack = Attack(server)
            attack.run(time.monotonic() + 60 * options.minutes)
    found = attack.found
    print(json.dumps(vars(found), indent=2))
    sys.exit(bool(found.failures or found.tracebacks or found.stalls))


if __name__ == "__main__":
    main()
