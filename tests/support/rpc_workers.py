"""Real `dflash-local worker` processes, and a network between them and us."""

import contextlib
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.managers import BaseManager

from ready_command import COMMAND

_START_S = 60


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class WorkerProcess:
    """A worker on loopback that computes on one thread of the CPU, or on another `device`. It may
    be killed, and begin again at the same port."""

    def __init__(self, *options: str, device: str = "CPU") -> None:
        self._options = "--device", device, "--threads", "1", *options
        self.port = free_port()
        self.name = f"127.0.0.1:{self.port}"
        self.begin()

    def begin(self) -> None:
        self.process = subprocess.Popen(
            [COMMAND, "worker", "--port", str(self.port), *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            assert self.process.poll() is None and time.monotonic() < end, "no worker"
            time.sleep(0.05)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output = self.process.stdout.read()

    def kill(self) -> None:
        """It ends at once, however busy it is. `output` is what it has printed until then."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()


@contextlib.contextmanager
def worker_processes(n: int, device: str = "CPU") -> Iterator[list[WorkerProcess]]:
    """So many workers, which do not outlive the block."""
    found: list[WorkerProcess] = []
    try:
        for _ in range(n):
            found.append(WorkerProcess(device=device))
        yield found
    finally:
        for worker in found:
            worker.kill()


class SlowNetwork:
    """A proxy to a port of this machine, with a delay each way. It counts what passes."""

    def __init__(self, port: int) -> None:
        self._delay_s = 0.0
        self._n_bytes = self._n_waits = 0
        self._asked = False
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def name(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def counts(self) -> tuple[int, int]:
        """The number of turns from request to answer, however many of either; and of bytes."""
        return self._n_waits, self._n_bytes

    def changed(self, data: bytes) -> bytes:
        """The bytes that arrive of a worker's answers."""
        return data

    def cut(self) -> None:
        """Break all connections, as a network does."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += [client, server]
                self._carry(client, server, is_request=True)
                self._carry(server, client, is_request=False)

    def _carry(self, source: socket.socket, target: socket.socket, *, is_request: bool) -> None:
        on_the_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def take() -> None:
            data = b"?"
            while data:
                data = b""
                with contextlib.suppress(OSError):
                    data = source.recv(1 << 20)
                    data = data if is_request else self.changed(data)
                self._n_bytes += len(data)
                if data and not is_request and self._asked:
                    self._n_waits += 1
                self._asked = is_request and bool(data)
                on_the_way.put((time.monotonic() + self._delay_s, data))

        def give() -> None:
            while True:
                due, data = on_the_way.get()
                if not data:
                    break
                time.sleep(max(0.0, due - time.monotonic()))
                with contextlib.suppress(OSError):
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=take, daemon=True).start()
        threading.Thread(target=give, daemon=True).start()


class Networks(BaseManager):
    """A process of its own for networks, so that they take no time from who is measured."""


Networks.register("SlowNetwork", SlowNetwork)
