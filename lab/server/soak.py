"""Does a server that has run for hours still give the answers of a fresh one?

    python -m lab.server.soak --minutes 60

Starts servers of tiny-coder, one mode after the other, again and again. Greedy requests come
from four clients at once: chats that begin alike, go on, and come back. Some clients leave in the
middle; the model is unloaded, and the server ended and started again on the same cache folder. Each
answer, with its log-probabilities, is held against that of a server that decodes plainly and keeps
nothing. Prints its findings for each mode. Exit code 1 if an answer was lost, or differs though
docs/exactness.md promises that it does not.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

import httpx

import tiny_coder
from lab.server import stall_server
from lab.server.resources import PATIENCE_S, Health
from server_process import ServerProcess
from server_process import serving as any_serving

STALL_S = 0.1
MACHINE = ("--gpu-layers", "0", "--threads", "1", "--ctx", "1024")
N_CLIENTS, N_CHATS = 4, 40
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Mode:
    """A way to serve. `promised`: its answers are those of plain decoding, to the bit."""

    options: tuple[str, ...]
    kv_type: str = "q8_0"
    promised: bool = True


MODES = {
    "one at a time, width 8": Mode(("--parallel", "1", "--draft-width", "8")),
    "four at once, width 8": Mode(("--draft-width", "8")),
    "four at once, auto": Mode(()),
    "four at once, plain": Mode(("--draft-width", "0")),
    "f16, --exact, plain": Mode(("--exact", "--draft-width", "0"), "f16"),
    "f16, four at once, auto": Mode((), "f16", promised=False),
    "four at once, trees": Mode(("--draft-shape", "tree", "--draft-width", "16"), promised=False),
}


@dataclass
class Found(Health):
    """The outcome of the requests in one mode."""

    promised: bool
    compared: int = 0
    different_texts: int = 0
    different_logprobs: int = 0
    largest_difference: float = 0.0
    left: int = 0
    lost: list[str] = field(default_factory=list)
    unloaded: int = 0
    started: int = 0
    unfinished_files: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        differ = self.different_texts or self.different_logprobs
        return bool(self.lost or self.unfinished_files or (self.promised and differ))

    def compare(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        self.compared += 1
        (a, b) = (answer["message"]["content"] for answer in (ours, theirs))
        (c, d) = (answer["logprobs"]["content"] for answer in (ours, theirs))
        self.different_texts += a != b
        same = takewhile(lambda pair: pair[0]["token"] == pair[1]["token"], zip(c, d, strict=False))
        gaps = [abs(x["logprob"] - y["logprob"]) for x, y in same]
        self.different_logprobs += any(gaps)
        self.largest_difference = max([self.largest_difference, *gaps])


def chats() -> list[dict[str, Any]]:
    """Bodies of requests: of one turn or several, many of which begin alike."""
    draw = random.Random(0)
    prompts = [prompt for kind in tiny_coder.prompts().values() for prompt in kind]
    made = []
    for _ in range(N_CHATS):
        said = [draw.choice(prompts) for _ in range(draw.choice((1, 1, 2, 3)))]
        messages = [{"role": "user", "content": said[0]}]
        for prompt in said[1:]:
            messages.append({"role": "assistant", "content": "def f(x):\n    return x\n"})
            messages.append({"role": "user", "content": prompt})
        made.append(
            {
                "model": "pair",
                "messages": messages,
                "max_tokens": draw.randrange(4, 48),
                "temperature": 0,
                "logprobs": True,
            }
        )
    return made


@contextmanager
def serving(*options: str) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    """A server of the pair, and a client of it. It is asked to end, and must."""
    target, drafter = tiny_coder.pair()
    with any_serving(
        *("--model", f"pair={target},{drafter}", *MACHINE, *options),
        command=stall_server.COMMAND,
        environment={"STALL_S": str(STALL_S)},
    ) as server:
        with server.client() as client:
            client.timeout = httpx.Timeout(PATIENCE_S)
            yield server, client
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.log
        assert not any("Traceback" in line for line in server.log), server.log


def ask(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(CHAT, json=body)
    response.raise_for_status()
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def leave(client: httpx.Client, body: dict[str, Any], n_events: int) -> None:
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        for n, _ in enumerate(response.iter_lines()):
            if n == n_events:
                break


def unload(client: httpx.Client) -> None:
    client.post("/api/generate", json={"model": "pair", "keep_alive": 0}).raise_for_status()


class Soak:
    """Serves the chats in one mode after the other, and notes the findings in each."""

    def __init__(self, seconds: float, seed: int) -> None:
        """`seconds`: how long one server runs."""
        self.found = {name: Found(mode.promised) for name, mode in MODES.items()}
        self._seconds = seconds
        self._random = random.Random(seed)
        self._chats = chats()
        self._folders = {name: tempfile.TemporaryDirectory() for name in MODES}
        self._plain: dict[str, list[dict[str, Any]]] = {}

    def close(self) -> None:
        for folder in self._folders.values():
            folder.cleanup()

    def plain(self, kv_type: str) -> list[dict[str, Any]]:
        """The answers of a server that decodes plainly, each from empty caches."""
        if kv_type not in self._plain:
            options = ("--kv-type", kv_type, "--exact", "--draft-width", "0", "--cache-mb", "0")
            with serving(*options) as (_, client):
                self._plain[kv_type] = [ask(client, body) for body in self._chats]
        return self._plain[kv_type]

    def serve(self, name: str) -> None:
        """One server in this mode. The next one of the mode finds its cache folder."""
        mode, found, folder = MODES[name], self.found[name], self._folders[name].name
        plain = self.plain(mode.kv_type)
        options = (*mode.options, "--kv-type", mode.kv_type, "--cache-dir", folder)
        with serving(*options) as (server, client):
            found.started += 1
            with found.watching(server), ThreadPoolExecutor(N_CLIENTS) as threads:
                until = time.monotonic() + self._seconds
                seeds = [self._random.randrange(2**32) for _ in range(N_CLIENTS)]
                jobs = [threads.submit(self._client, client, found, plain, until, s) for s in seeds]
                for job in jobs:
                    job.result()
            found.weigh(server.process.pid)
        found.unfinished_files = [str(path) for path in Path(folder).rglob("*.tmp")]

    def _client(
        self,
        client: httpx.Client,
        found: Found,
        plain: list[dict[str, Any]],
        until: float,
        seed: int,
    ) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until:
            i, dice = draw.randrange(N_CHATS), draw.random()
            try:
                if dice < 0.1:
                    leave(client, self._chats[i], draw.randrange(8))
                    found.left += 1
                elif dice < 0.13:
                    unload(client)
                    found.unloaded += 1
                else:
                    found.compare(ask(client, self._chats[i]), plain[i])
            except Exception as error:
                found.lost.append(f"chat {i}: {type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long, at least")
    parser.add_argument("--seconds", type=float, default=60, help="how long each server runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    soak = Soak(options.seconds, options.seed)
    end = time.monotonic() + 60 * options.minutes
    try:
        while True:
            for name in MODES:
                print(f"{name} ...", file=sys.stderr, flush=True)
                soak.serve(name)
            if time.monotonic() >= end:
                break
    finally:
        soak.close()
        print(json.dumps({name: asdict(found) for name, found in soak.found.items()}, indent=2))
    sys.exit(any(found.is_bad for found in soak.found.values()))


if __name__ == "__main__":
    main()
