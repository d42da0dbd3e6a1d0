"""A server gets rid of clients that would hold it up, and of bytes that are not HTTP."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from impatient_server import COMMAND
from raw_http import exchange, message, posted
from server_process import ServerProcess, n_busy, serving, until


@pytest.fixture(scope="module")
def impatient(cache_folder: Path) -> Iterator[ServerProcess]:
    """One slot, one place in the queue, short bounds."""
    with serving(command=COMMAND) as running:
        yield running


@contextmanager
def stuck_reader(server: ServerProcess, n_predict: int) -> Iterator[socket.socket]:
    """A client that asks for an answer and does not read it."""
    # 1.5 KB a token: far more than the kernel's buffers and asyncio's hold, which is 80 KB.
    answer = {"prompt": "def f(x):", "n_predict": n_predict, "n_probs": 20, "ignore_eos": True}
    request = posted("/completion", json.dumps({**answer, "stream": True}).encode())
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request)
        yield connection


@pytest.mark.slow
def test_a_stuck_reader_does_not_hold_up_the_end(cache_folder: Path) -> None:
    environment = {"READ_S": "600"}
    with serving(command=COMMAND, environment=environment) as server, server.client() as client:
        with stuck_reader(server, 400):
            until(lambda: n_busy(client) == 1)
            server.send(signal.SIGTERM)
            assert server.wait(60) == 0
        server.wait_for("POST /completion .*broken off")


@pytest.mark.slow
@pytest.mark.parametrize("n_predict", [400, 120], ids=["while it is generated", "when it waits"])
def test_a_stuck_reader_neither_holds_the_slot_nor_its_connection(
    impatient: ServerProcess, n_predict: int
) -> None:
    begin = len(impatient.log)
    with impatient.client() as client, stuck_reader(impatient, n_predict) as connection:
        line = impatient.wait_for("POST /completion", after=begin).string
        assert "broken off" in line
        until(lambda: n_busy(client) == 0)
        received = b""
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                received += part
    assert received.startswith(b"HTTP/1.1 200") and b'"stop":true' not in received


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "],
    ids=["nothing", "half a line", "half a head"],
)
def test_a_head_that_never_ends(impatient: ServerProcess, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(100) == b""


@pytest.mark.slow
def test_a_second_head_that_never_ends(impatient: ServerProcess) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(first)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(first[:20])
        while answer := connection.recv(4096):
            assert not answer.startswith(b"HTTP/1.1")


def test_the_body_of_a_refused_request_that_never_ends(impatient: ServerProcess) -> None:
    request = posted("/v1/completions", b"{", "Host: evil.example", length=100)
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(request)
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")
        connection.sendall(b" ")
        while connection.recv(4096):
            pass


def test_a_body_that_never_ends(impatient: ServerProcess) -> None:
    status, answer = exchange(impatient, posted("/v1/completions", b"{", length=100))
    assert status == 408 and message(answer)


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


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    ],
    ids=range(6),
)
def test_what_is_no_http_gets_an_error(server: ServerProcess, request_bytes: bytes) -> None:
    try:
        status, body = exchange(server, request_bytes)
    except ConnectionError:  # closed before all of it was read
        return
    assert status == 400
    assert message(body)
