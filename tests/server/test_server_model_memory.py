"""Models that have no room beside each other: who goes, who stays, and what is told meanwhile."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from openai_api import CHAT, user
from server_process import ServerProcess, serving, until

SMALL = (sys.executable, str(Path(__file__).parents[1] / "support" / "small_machine.py"))
LONG = {
    "messages": user("def f(x):"),
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}
"""Some 700 KB; what can be on its way to a client is 160."""
SHORT = {"prompt": "def f(x):", "max_tokens": 1}


@pytest.fixture(scope="module")
def small(cache_folder: Path) -> Iterator[ServerProcess]:
    """Four models, two of which it has room for."""
    with serving(command=SMALL) as running:
        yield running


def states(server: ServerProcess) -> dict[str, str]:
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
    return {entry["id"]: entry["status"]["value"] for entry in listed}


def loaded(server: ServerProcess) -> set[str]:
    return {name for name, state in states(server).items() if state == "loaded"}


def use(server: ServerProcess, *names: str) -> None:
    with server.client() as client:
        for name in names:
            answer = client.post("/v1/completions", json={"model": name, **SHORT})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name


@contextmanager
def busy(server: ServerProcess, name: str) -> Iterator[None]:
    """A model at work: its answer is too long to be sent unless it is read, which it is at last."""
    body = {"model": name, **LONG}
    # A buffer of less than a packet, 64 KB here, would be slow to open again once it was full.
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)])
    with (
        server.client(transport=small) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield
        rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


def test_the_one_used_longest_ago_leaves(small: ServerProcess) -> None:
    use(small, "a", "b")
    assert loaded(small) == {"a", "b"}
    use(small, "a", "c")
    assert loaded(small) == {"a", "c"}
    assert "to make room for c" in small.wait_for("^unloading b").string


def test_one_with_a_request_stays(small: ServerProcess) -> None:
    use(small, "b", "a")
    with busy(small, "b"):
        use(small, "c")
        assert loaded(small) == {"b", "c"}


@pytest.mark.slow
def test_where_all_are_at_work_a_request_waits_until_one_is_not(small: ServerProcess) -> None:
    use(small, "a", "b")
    with ExitStack() as rest, ThreadPoolExecutor() as pool:
        rest.enter_context(busy(small, "b"))
        client = rest.enter_context(small.client())
        body = {"model": "c", **SHORT, "stream": True}
        with busy(small, "a"):
            answer = rest.enter_context(client.stream("POST", "/v1/completions", json=body))
            lines = answer.iter_lines()
            assert next(lines) == ": waiting to load c"
            assert states(small)["c"] == "loading"
            # The one that is to go takes no new requests: it would never be idle.
            again = pool.submit(use, small, "a")
            until(lambda: states(small)["a"] == "loading")
            use(small, "b")
            assert not again.done()
        events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[0].removeprefix("data: "))["model"] == "c"
        again.result()
        assert loaded(small) == {"a", "b"}


@pytest.mark.slow
def test_who_leaves_while_waiting_frees_the_place_and_moves_nobody(small: ServerProcess) -> None:
    with busy(small, "a"), busy(small, "b"):
        for _ in range(5):  # more than may wait at once
            with small.client() as client, suppress(httpx.ReadTimeout):
                body = {"model": "c", **SHORT}
                client.post("/v1/completions", json=body, timeout=0.3)
        until(lambda: states(small)["c"] == "unloaded")
        use(small, "a", "b")
        assert loaded(small) == {"a", "b"}


@pytest.mark.slow
def test_no_more_wait_for_a_model_than_may(small: ServerProcess) -> None:
    with ExitStack() as answers, small.client() as client:
        answers.enter_context(busy(small, "a"))
        answers.enter_context(busy(small, "b"))
        for _ in range(2):
            waits = answers.enter_context(small.client())
            body = {"model": "c", **SHORT, "stream": True}
            stream = answers.enter_context(waits.stream("POST", "/v1/completions", json=body))
            assert stream.status_code == 200
        refused = client.post("/v1/completions", json={"model": "c", **SHORT})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
