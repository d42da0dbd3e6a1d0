"""How a server begins and ends, and how it gets rid of clients that would hold it up."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from server_process import ServerProcess, serving, until

LONG = {"prompt": "def f(x):", "max_tokens": 3000, "stream": True, "ignore_eos": True}
SHORT = {"prompt": "def f(x):", "max_tokens": 4}
IMPATIENT = (sys.executable, str(Path(__file__).parents[1] / "support" / "impatient_server.py"))


@pytest.fixture(scope="module")
def impatient(cache_folder: Path) -> Iterator[ServerProcess]:
    """One slot, one place in the queue, short bounds."""
    with serving(command=IMPATIENT) as running:
        yield running


@contextmanager
def streaming(client: httpx.Client, body: dict[str, object]) -> Iterator[Iterator[str]]:
    """The lines of a stream of which the first event has come."""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def n_at_work(client: httpx.Client) -> int:
    return sum(slot["is_processing"] for slot in client.get("/slots").json())


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


# Beginning and end.


def test_what_a_server_says_as_it_starts(server: ServerProcess) -> None:
    assert server.wait_for("^serving tiny-coder-q8_0 at ")[0]
    assert f"base URL http://127.0.0.1:{server.port}/v1" in server.wait_for("^editors: ").string
    assert server.port > 0


def test_sigterm_lets_running_answers_finish(cache_folder: Path) -> None:
    with serving("--threads", "1") as server, server.client() as client:
        with streaming(client, {**LONG, "max_tokens": 600}) as lines:
            server.send(signal.SIGTERM)
            server.wait_for("finishing 1 running request")
            with server.client() as other:
                health = other.get("/health")
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                refused = other.post("/v1/completions", json=SHORT)
                assert (refused.status_code, code(refused)) == (503, "shutting_down")
                assert int(refused.headers["retry-after"]) > 0
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert server.wait() == 0
        assert "Traceback" not in "\n".join(server.log)


@pytest.mark.parametrize(
    ("signals", "exit_code"),
    [((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGINT,), 130)],
    ids=["SIGTERM twice", "Ctrl-C"],
)
def test_ends_at_once(
    cache_folder: Path, signals: tuple[signal.Signals, ...], exit_code: int
) -> None:
    with serving("--threads", "1") as server, server.client() as client:
        with pytest.raises(httpx.TransportError), streaming(client, LONG) as lines:
            for number in signals[:-1]:
                server.send(number)
                server.wait_for("finishing 1 running request")
            server.send(signals[-1])
            for _ in lines:
                pass
        assert server.wait() == exit_code
        assert "Traceback" not in "\n".join(server.log)


def test_what_does_not_finish_in_time_is_cut_off(cache_folder: Path) -> None:
    with serving(command=IMPATIENT) as server, server.client() as client:
        with pytest.raises(httpx.TransportError), streaming(client, LONG) as lines:
            server.send(signal.SIGTERM)
            for _ in lines:
                pass
        server.wait_for("had to be cut off")
        assert server.wait() == 0


# Clients that leave.


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: ServerProcess, stream: bool) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    with server.client() as client:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            until(lambda: n_at_work(client) == 1)
        until(lambda: n_at_work(client) == 0)
        assert client.post("/v1/completions", json=SHORT).status_code == 200


def test_a_stuck_reader_neither_holds_the_slot_nor_its_connection(
    impatient: ServerProcess,
) -> None:
    body = json.dumps({**LONG, "max_tokens": 400, "logprobs": 5}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    begin = len(impatient.log)
    with impatient.client() as client, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        until(lambda: n_at_work(client) == 1)
        line = impatient.wait_for("POST /v1/completions", after=begin).string
        assert "broken off" in line
        until(lambda: n_at_work(client) == 0)
        received = b""
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received


# Clients that never finish what they send.


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "],
    ids=["nothing", "half a line", "half a head"],
)
def test_a_head_that_never_ends(impatient: ServerProcess, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""


def test_a_second_head_that_never_ends(impatient: ServerProcess) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(first)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(first[:20])
        while answer := connection.recv(4096):
            assert not answer.startswith(b"HTTP/1.1")


def test_the_body_of_a_refused_request_that_never_ends(impatient: ServerProcess) -> None:
    head = ["POST /v1/completions HTTP/1.1", "Host: evil.example", "Content-Length: 100", "", "{"]
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")
        connection.sendall(b" ")
        while connection.recv(4096):
            pass


def test_a_body_that_never_ends(impatient: ServerProcess) -> None:
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Length: 100", "", "{"]
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall("\r\n".join(head).encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_more_connections_than_there_may_be(impatient: ServerProcess) -> None:
    address = ("127.0.0.1", impatient.port)
    others = [socket.create_connection(address, timeout=60) for _ in range(9)]
    try:
        answers = [connection.recv(4096) for connection in others]
        refused = [answer for answer in answers if answer]
        assert refused
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in refused)
        assert all(b"too_many_connections" in answer for answer in refused)
    finally:
        for connection in others:
            connection.close()
    until(lambda: httpx.get(f"{impatient.url}/health", trust_env=False).status_code == 200)


# More requests than there is room for.


def test_a_full_queue_and_a_long_wait(impatient: ServerProcess) -> None:
    def waits() -> bool:
        with impatient.client() as client:
            return "llamacpp:requests_deferred 1.0" in client.get("/metrics").text

    with (
        impatient.client() as client,
        ThreadPoolExecutor() as pool,
        streaming(client, LONG),
        impatient.client() as other,
    ):
        second = pool.submit(other.post, "/v1/completions", json={**SHORT, "stream": True})
        until(waits)
        with impatient.client() as another:
            third = another.post("/v1/completions", json=SHORT)
        assert (third.status_code, code(third)) == (429, "queue_full")
        assert int(third.headers["retry-after"]) > 0
        late = second.result()
        assert (late.status_code, code(late)) == (503, "queue_timeout")
