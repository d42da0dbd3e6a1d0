"""Many clients at a running server, some of them rude: is every request answered, nothing left?

    dflash-local serve --parallel 4 --port 8080 &
    python -m lab.server.load --url http://127.0.0.1:8080 --pid $! --requests 2000 --clients 16

It must answer well-formed requests and refuse malformed ones with an error of the API. When all
clients are gone, it must be idle. With --pid, its memory is reported too. Exit code 1 if anything
is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from lab.server.resources import resources

PROMPTS = (
    "Implement `add` in Python: Return the sum of two numbers.",
    "Implement `is_prime` in Python: Tell whether a number is prime.",
    "Implement `read_json` in Python: Read a JSON file and return its contents.",
    "Write a function that reverses a list in place.",
)
CODE = "def area(width, height):\n    return width * height\n\n\ndef "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
# What a server must refuse: (path, body, content type)
MALFORMED: tuple[tuple[str, bytes, str], ...] = (
    ("/v1/chat/completions", b"", "application/json"),
    ("/v1/chat/completions", b"{", "application/json"),
    ("/v1/chat/completions", b"\xff\xfe\x00", "application/json"),
    ("/v1/chat/completions", b"[]", "application/json"),
    ("/v1/chat/completions", b'{"messages": []}', "application/json"),
    ("/v1/chat/completions", b'{"messages": "hello"}', "application/json"),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', "application/json"),
    ("/v1/chat/completions", b"[" * 100_000, "application/json"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -2}', "application/json"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1e400}', "application/json"),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', "application/json"),
    ("/v1/completions", b'{"prompt": [99999999]}', "application/json"),
    ("/v1/completions", b'{"prompt": "a", "logit_bias": [1]}', "application/json"),
    ("/infill", b'{"input_prefix": 7}', "application/json"),
    ("/completion", b'{"prompt": {"a": 1}}', "application/json"),
)
_GRACE_S = 20.0  # until the last sequences must have ended, after their clients are gone
_ATTEMPTS = 1000  # of a request that finds the queue full


@dataclass
class LoadReport:
    """The outcomes of the requests, by kind. `failures` are the things that must not happen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    told_to_come_back: int = 0
    tokens: int = 0
    seconds: float = 0.0
    memory_mib: list[float] = field(default_factory=list)


class Load:
    """`n_requests` of mixed kinds from `n_clients` at once: the same ones for the same seed."""

    def __init__(
        self,
        url: str,
        *,
        n_requests: int,
        n_clients: int,
        seed: int = 0,
        key: str | None = None,
        pid: int | None = None,
    ) -> None:
        self.report = LoadReport()
        self._url = url.rstrip("/")
        self._n_requests = n_requests
        self._n_clients = n_clients
        self._random = random.Random(seed)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._pid = pid
        self._kinds: tuple[tuple[float, Callable[[random.Random], Awaitable[str]]], ...] = (
            (4, self._chat),
            (4, self._chat_streamed),
            (2, self._completion),
            (2, self._infill),
            (1, self._schema),
            (2, self._disconnect),
            (1, self._hang_up),
            (1, self._slow_reader),
            (1, self._never_reads),
            (2, self._malformed),
            (1, self._half_a_body),
        )

    async def run(self) -> LoadReport:
        """All requests, then the wait until the server is idle."""
        start = time.monotonic()
        todo = list(range(self._n_requests))
        seeds = [self._random.randrange(2**32) for _ in todo]
        todo.reverse()
        milestones = [self._n_requests * part // 4 for part in (1, 2, 3)]
        timeout = httpx.Timeout(600, connect=60)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=timeout, limits=limits
        ) as self._http:

            async def client() -> None:
                while todo:
                    number = todo.pop()
                    await self._one(number, random.Random(seeds[number]))
                    if self._n_requests - len(todo) in milestones:
                        self._weigh()

            await asyncio.gather(*(client() for _ in range(self._n_clients)))
            self.report.seconds = round(time.monotonic() - start, 1)
            try:
                await self._expect_idle()
            except Exception as error:
                self.report.failures.append(f"afterwards: {type(error).__name__}: {error}")
        self._weigh()
        return self.report

    def _weigh(self) -> None:
        taken = None if self._pid is None else resources(self._pid)
        if taken is not None:
            self.report.memory_mib.append(taken.memory_mib)

    async def _one(self, number: int, dice: random.Random) -> None:
        weights = [weight for weight, _ in self._kinds]
        (_, kind) = dice.choices(self._kinds, weights)[0]
        name = kind.__name__.lstrip("_")
        try:
            outcome = await kind(dice)
        except Exception as error:
            outcome = "failed"
            self.report.failures.append(f"{number} {name}: {type(error).__name__}: {error}")
        self.report.outcomes[f"{name}: {outcome}"] += 1

    # Clients that wait for the answer

    async def _chat(self, dice: random.Random) -> str:
        answer = await self._post("/v1/chat/completions", self._chat_body(dice))
        self._expect(answer["choices"][0]["finish_reason"] in ("stop", "length"), answer)
        self.report.tokens += answer["usage"]["completion_tokens"]
        return "answered"

    async def _chat_streamed(self, dice: random.Random) -> str:
        body = self._chat_body(dice) | {"stream": True, "stream_options": {"include_usage": True}}
        events = await self._events("/v1/chat/completions", body)
        self._expect(events[-1] == "[DONE]", events[-1])
        usage = json.loads(events[-2])["usage"]
        self.report.tokens += usage["completion_tokens"]
        return "answered"

    async def _completion(self, dice: random.Random) -> str:
        body = self._sampling(dice) | {"prompt": CODE, "n": dice.choice((1, 1, 2))}
        answer = await self._post("/v1/completions", body)
        self._expect(len(answer["choices"]) == body["n"], answer)
        self.report.tokens += answer["usage"]["completion_tokens"]
        return "answered"

    async def _infill(self, dice: random.Random) -> str:
        body = {
            "input_prefix": CODE[: dice.randrange(10, len(CODE))],
            "input_suffix": "\n    return total\n",
            "n_predict": dice.randrange(1, 32),
            "t_max_predict_ms": dice.choice((200, 1000)),
        }
        answer = await self._post("/infill", body)
        self._expect(isinstance(answer["content"], str), answer)
        self.report.tokens += answer["tokens_predicted"]
        return "answered"

    async def _schema(self, dice: random.Random) -> str:
        body = self._chat_body(dice) | {"max_tokens": 64}
        form = {"name": "thing", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
        choice = (await self._post("/v1/chat/completions", body))["choices"][0]
        if choice["finish_reason"] == "stop":
            self._expect(set(json.loads(choice["message"]["content"])) == {"name", "n"}, choice)
        return "answered"

    # Clients that do not

    async def _disconnect(self, dice: random.Random) -> str:
        body = self._chat_body(dice) | {"stream": True, "max_tokens": 512}
        n = dice.randrange(1, 6)
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _line in response.aiter_lines():
                n -= 1
                if not n:
                    break
        return "left"

    async def _hang_up(self, dice: random.Random) -> str:
        body = json.dumps(self._chat_body(dice) | {"max_tokens": 512}).encode()
        return await self._send_and_leave(dice.random() / 5, body)

    async def _slow_reader(self, dice: random.Random) -> str:
        body = json.dumps(self._chat_body(dice) | {"stream": True}).encode()
        reader, writer = await self._send(body)
        while await reader.read(64):
            await asyncio.sleep(0.02)
        await _close(writer)
        return "read all"

    async def _never_reads(self, dice: random.Random) -> str:
        body = json.dumps(self._chat_body(dice) | {"stream": True, "max_tokens": 512}).encode()
        return await self._send_and_leave(1 + dice.random(), body)

    async def _malformed(self, dice: random.Random) -> str:
        path, body, kind = dice.choice(MALFORMED)
        response = await self._http.post(path, content=body, headers={"content-type": kind})
        self._expect(400 <= response.status_code < 500, f"{path} {body[:60]!r}: {response.text}")
        error = response.json()["error"]
        self._expect(bool(error["message"]) and "Traceback" not in response.text, response.text)
        return "refused"

    async def _half_a_body(self, dice: random.Random) -> str:
        body = json.dumps(self._chat_body(dice)).encode()
        return await self._send_and_leave(dice.random() / 5, body[: len(body) // 2], len(body))

    async def _send_and_leave(self, after_s: float, body: bytes, length: int | None = None) -> str:
        _, writer = await self._send(body, length)
        await asyncio.sleep(after_s)
        await _close(writer)
        return "left"

    # Requests

    def _chat_body(self, dice: random.Random) -> dict[str, Any]:
        messages = [{"role": "user", "content": dice.choice(PROMPTS)}]
        for _ in range(dice.randrange(3)):
            messages.append({"role": "assistant", "content": "def f():\n    pass\n"})
            messages.append({"role": "user", "content": dice.choice(PROMPTS)})
        return self._sampling(dice) | {"messages": messages}

    @staticmethod
    def _sampling(dice: random.Random) -> dict[str, Any]:
        return {
            "model": "any",
            "max_tokens": dice.randrange(1, 64),
            "temperature": dice.choice((0, 0, 0.7, 1.0)),
            "seed": dice.randrange(1000),
        }

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        for _ in range(_ATTEMPTS):
            response = await self._http.post(path, json=body)
            if not await self._told_to_wait(response):
                break
        self._expect(response.status_code == 200, f"{response.status_code} {response.text}")
        return response.json()

    async def _events(self, path: str, body: dict[str, Any]) -> list[str]:
        for _ in range(_ATTEMPTS):
            async with self._http.stream("POST", path, json=body) as response:
                if await self._told_to_wait(response):
                    continue
                self._expect(response.status_code == 200, response.status_code)
                lines = [line async for line in response.aiter_lines()]
                return [line[len("data: ") :] for line in lines if line.startswith("data: ")]
        raise AssertionError("the queue was full all the time")

    async def _told_to_wait(self, response: httpx.Response) -> bool:
        if response.status_code != 429:
            return False
        self.report.told_to_come_back += 1
        await asyncio.sleep(min(float(response.headers["retry-after"]), 2.0))
        return True

    async def _send(
        self, body: bytes, length: int | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own, which can be read slowly or not at all."""
        url = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        headers = {
            "host": url.netloc,
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(body) if length is None else length),
            **self._headers,
        }
        lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return reader, writer

    # Afterwards

    async def _expect_idle(self) -> None:
        end = time.monotonic() + _GRACE_S
        while True:
            metrics = (await self._http.get("/metrics")).text
            names = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
            left = {name: metric(metrics, name) for name in names}
            if not any(left.values()):
                return
            if time.monotonic() > end:
                self.report.failures.append(f"not idle when all clients are gone: {left}")
                return
            await asyncio.sleep(0.2)

    @staticmethod
    def _expect(holds: bool, found: object) -> None:
        if not holds:
            raise AssertionError(str(found)[:300])


def metric(text: str, name: str) -> float:
    """One number from a Prometheus page. Raises AssertionError if it is missing."""
    found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if found is None:
        raise AssertionError(f"the metrics have no {name}")
    return float(found[1])


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", help="the server's API key")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    options = parser.parse_args()
    load = Load(
        options.url,
        n_requests=options.requests,
        n_clients=options.clients,
        seed=options.seed,
        key=options.key,
        pid=options.pid,
    )
    report = asyncio.run(load.run())
    print(json.dumps(vars(report), indent=2))
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
