"""Tokens a second that running OpenAI-compatible servers give to 1, 4 and 8 clients at once.

    python -m lab.server.throughput --url http://127.0.0.1:8080 --url http://127.0.0.1:8081

Each client asks one streamed, greedy chat question after another. All servers get the same
questions in turn, so that a drift of the machine hits all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
from tabulate import tabulate

QUESTIONS = (
    "Implement `add` in Python: Return the sum of two numbers.",
    "Implement `is_prime` in Python: Tell whether a number is prime.",
    "Implement `read_json` in Python: Read a JSON file and return its contents.",
    "Implement `fibonacci` in Python: Return the n-th Fibonacci number.",
    "Implement `reverse` in Python: Return a list in the opposite order.",
    "Implement `word_count` in Python: Count the words of a text.",
    "Implement `flatten` in Python: Flatten a list of lists.",
    "Implement `clamp` in Python: Limit a number to a range.",
)


@dataclass(frozen=True)
class Measurement:
    """One server with a number of clients: totals, and medians over the answers."""

    url: str
    n_clients: int
    n_tokens: int
    seconds: float
    ttft_s: float
    answer_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


async def measure(url: str, n_clients: int, n_requests: int, max_tokens: int) -> Measurement:
    """`n_requests` answers through `n_clients` clients. Raises httpx.HTTPError."""
    todo = list(range(n_requests))
    answers: list[tuple[int, float, float]] = []
    # Some servers close a connection while the next request is on its way.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:

        async def client() -> None:
            while todo:
                number = todo.pop()
                answers.append(await _answer(http, number, max_tokens))

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(n_clients)))
        seconds = time.perf_counter() - start
    return Measurement(
        url=url,
        n_clients=n_clients,
        n_tokens=sum(n for n, _, _ in answers),
        seconds=seconds,
        ttft_s=median(ttft for _, ttft, _ in answers),
        answer_tokens_per_s=median(n / whole for n, _, whole in answers),
    )


async def _answer(
    http: httpx.AsyncClient, number: int, max_tokens: int
) -> tuple[int, float, float]:
    """Tokens, seconds to the first text, seconds to the end."""
    body: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first, n_tokens = None, 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            text = [choice for choice in event["choices"] if choice["delta"].get("content")]
            if text and first is None:
                first = time.perf_counter() - start
            if event.get("usage"):
                n_tokens = event["usage"]["completion_tokens"]
    whole = time.perf_counter() - start
    return n_tokens, whole if first is None else first, whole


async def compare(
    urls: Sequence[str], clients: Sequence[int], n_requests: int, max_tokens: int, repeats: int
) -> list[Measurement]:
    """The best of `repeats` for each server and number of clients, after a warm-up."""
    for url in urls:
        await measure(url, max(clients), 2 * max(clients), max_tokens)
    found: list[Measurement] = []
    for n_clients in clients:
        runs = [
            await measure(url, n_clients, n_requests, max_tokens)
            for _ in range(repeats)
            for url in urls
        ]
        for url in urls:
            found.append(max((r for r in runs if r.url == url), key=lambda r: r.tokens_per_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", action="append", required=True)
    parser.add_argument("--clients", default="1,4,8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    options = parser.parse_args()
    clients = [int(n) for n in options.clients.split(",")]
    found = asyncio.run(
        compare(options.url, clients, options.requests, options.max_tokens, options.repeats)
    )
    rows = [
        (m.n_clients, m.url, m.tokens_per_s, m.answer_tokens_per_s, 1e3 * m.ttft_s) for m in found
    ]
    headers = ("clients", "server", "total tokens/s", "of an answer", "first text after ms")
    print(tabulate(rows, headers, floatfmt=".1f"))


if __name__ == "__main__":
    main()
