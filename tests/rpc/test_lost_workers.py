"""A server whose model has layers on a worker that dies: it tells, goes on, and loads again."""

import json
import random
import threading
from collections.abc import Iterator

import httpx
import pytest

from rpc_workers import WorkerProcess, worker_processes
from server_process import ServerProcess, serving

BODY = {"prompt": "def fibonacci(n):", "max_tokens": 200, "temperature": 0, "stream": True}
OPTIONS = ("--kv-type", "q8_0", "--threads", "1", "--draft-width", "8", "--draft-shape", "chain")


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with worker_processes(1) as found:
        yield found[0]


@pytest.fixture(scope="module")
def remote_server(worker: WorkerProcess) -> Iterator[ServerProcess]:
    with serving("--rpc", worker.name, "--ctx", "1024", *OPTIONS) as server:
        yield server


def answer(client: httpx.Client) -> tuple[str, str]:
    """The text of an answer, and the error that it ended with; empty if none."""
    text, error = "", ""
    with client.stream("POST", "/v1/completions", json=BODY) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                error += event.get("error", {}).get("message", "")
            elif line.startswith("{"):
                error += json.loads(line)["error"]["message"]
    return text, error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(7))
def test_a_killed_worker_ends_requests_and_not_the_server(
    remote_server: ServerProcess, worker: WorkerProcess, seed: int
) -> None:
    with remote_server.client() as client:
        whole, error = answer(client)
        assert whole and not error
        delay = random.Random(seed).random()
        killer = threading.Timer(delay, worker.kill)
        killer.start()
        text, error = answer(client)
        killer.join()
        assert whole.startswith(text)
        assert error or text == whole
        if error:
            assert worker.name in error and len(error.splitlines()) == 1
            text, error = answer(client)
            assert not text and "no worker answers" in error
        worker.begin()
        assert answer(client) == (whole, "")
        assert remote_server.process.poll() is None
