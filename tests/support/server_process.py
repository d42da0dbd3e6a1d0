"""A real `dflash-local serve` process for tests, and clients for it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from ready_command import COMMAND, Running, started

EXACT = ("--gpu-layers", "0", "--kv-type", "q8_0", "--threads", "1", "--draft-width", "8")
"""On the CPU, in Q8_0, texts equal plain decoding's to the bit; with a fixed width there always are
drafts. One thread never waits for another, which other tests may delay."""

SERVE: tuple[str | Path, ...] = (COMMAND, "serve", "--port", "0")

_START_S = 120


class ServerProcess:
    """A server on a free port. `log` holds the lines that it has written to stderr so far. The
    command and Python code are copies of a ready process, other programs begin from nothing."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str | Path] = SERVE,
    ) -> None:
        self.log: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        reads, writes = os.pipe()
        self._stderr = open(reads, encoding="utf-8")  # noqa: SIM115
        null, variables = os.open(os.devnull, os.O_RDWR), {**os.environ, **(environment or {})}
        try:
            self.process: Running
            if command[0] == COMMAND or tuple(command[:2]) == (sys.executable, "-c"):
                self.process = started(
                    *command[1:],
                    *arguments,
                    stdin=null,
                    stdout=null,
                    stderr=writes,
                    environment=variables,
                )
            else:
                self.process = subprocess.Popen(
                    [*command, *arguments], stdin=null, stdout=null, stderr=writes, env=variables
                )
        finally:
            os.close(null)
            os.close(writes)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self) -> None:
        """Wait until it serves."""
        self.url = self.wait_for(r"^serving .* at (https?://\S+|\S+\.sock)")[1]
        self.port = urlsplit(self.url).port or 0

    def client(self, **more: object) -> httpx.Client:
        """A client that knows where the server is, no proxy, and no certificates: to read them
        takes longer than most requests."""
        options = {"timeout": 120, "trust_env": False, "verify": False, **more}
        return httpx.Client(base_url=self.url, **options)  # type: ignore[arg-type]

    def wait_for(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """The match in the first line of the log, from number `after` on, that has `pattern`."""

        def found() -> re.Match[str] | None:
            return next((m for line in self.log[after:] if (m := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, _START_S)
            match = found()
        assert match is not None, "\n".join([f"no line has {pattern!r}:", *self.log])
        return match

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 120) -> int:
        """The exit code, once it has ended, with the whole of the log read."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        with self._stderr as stream:
            for line in stream:
                with self._news:
                    self.log.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@contextmanager
def serving(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str | Path] = SERVE,
) -> Iterator[ServerProcess]:
    """A server that is ready, and that does not outlive the block."""
    server = ServerProcess(*arguments, environment=environment, command=command)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def n_busy(client: httpx.Client) -> int:
    """The number of requests that the server's first model is answering."""
    return sum(slot["is_processing"] for slot in client.get("/slots").json())


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens soon."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def server(cache_folder: Path) -> Iterator[ServerProcess]:
    """The tiny pair as users get it, but exact to the bit. Tests leave it as they found it."""
    with serving(*EXACT) as running:
        yield running
        with running.client() as client:
            until(lambda: n_busy(client) == 0)
            body = {"prompt": "def f(", "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert not [line for line in running.log if "Traceback" in line or "failed with" in line]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of that server."""
    with server.client() as connected:
        yield connected
