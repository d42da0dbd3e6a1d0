"""The start and the end of a server."""

import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from dflash_local.server import lifecycle
from dflash_local.server.http.settings import ServerSettings
from dflash_local.server.models.pool import ModelPool
from dflash_local.server.models.source import ModelSource
from impatient_server import COMMAND
from server_process import EXACT, SERVE, ServerProcess, serving, until

LONG = {"prompt": "def f(x):", "max_tokens": 3000, "stream": True, "ignore_eos": True}
SHORT = {"prompt": "def f(x):", "max_tokens": 4}


@contextmanager
def streaming(client: httpx.Client, body: dict[str, object]) -> Iterator[Iterator[str]]:
    """The lines of a stream of which the first event has come."""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def test_what_a_server_says_as_it_starts(server: ServerProcess) -> None:
    assert server.wait_for("^serving tiny-coder-q8_0 at ")[0]
    assert f"base URL http://127.0.0.1:{server.port}/v1" in server.wait_for("^editors: ").string
    assert server.port > 0


def test_sigterm_lets_running_answers_finish(cache_folder: Path) -> None:
    # Ready to ask: the answer must not end before the other client has asked twice.
    with serving("--threads", "1") as server, server.client() as client, server.client() as other:
        with streaming(client, {**LONG, "max_tokens": 600}) as lines:
            server.send(signal.SIGTERM)
            server.wait_for("finishing 1 running request")
            health = other.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            refused = other.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert server.wait() == 0
        assert "Traceback" not in "\n".join(server.log)


@pytest.mark.one_in(2)
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


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_cut_off(cache_folder: Path) -> None:
    with serving(command=COMMAND) as server, server.client() as client:
        with pytest.raises(httpx.TransportError), streaming(client, LONG) as lines:
            server.send(signal.SIGTERM)
            for _ in lines:
                pass
        server.wait_for("had to be cut off")
        assert server.wait() == 0


def test_health(client: httpx.Client) -> None:
    for path in ("/health", "/v1/health"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert client.head("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of open files")
def test_more_idle_connections_than_files_fill_no_log(cache_folder: Path) -> None:
    limited = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *SERVE)
    with serving(*EXACT, command=limited) as server, ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        time.sleep(2)
        assert len(server.log) < 50
        stack.close()
        with server.client() as client:
            until(lambda: client.get("/health").status_code == 200)


def test_the_collector_passes_over_what_was_there_before_a_request(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going through all modules, for a body of many values, would hold up the event loop."""
    frozen: list[int] = []
    monkeypatch.setattr(
        lifecycle.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count())
    )
    settings = ServerSettings(port=0)
    try:
        with lifecycle.bind(settings) as bound:
            lifecycle.serve(ModelPool([ModelSource("m", *pair)]), settings, bound, print)
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
