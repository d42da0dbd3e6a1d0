"""The resources of a server's process, on Linux, and the delay of its health route."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from server_process import ServerProcess

_EVERY_S = 0.05
PATIENCE_S = 600
"""Longer than anything takes on the slowest machine."""


class Resources(NamedTuple):
    memory_mib: float
    """Resident."""
    threads: int
    open_files: int


def resources(pid: int) -> Resources | None:
    """The resources of the process now; None if the system does not tell."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    text = status.read_text(encoding="ascii")
    kb, threads = (
        int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("VmRSS", "Threads")
    )
    return Resources(round(kb / 1024, 1), threads, len(list(Path(f"/proc/{pid}/fd").iterdir())))


@dataclass(kw_only=True)
class Health:
    """The health of a server over a run."""

    slowest_health_ms: float = 0.0
    stalls: list[str] = field(default_factory=list)
    """Steps of the event loop that took long, in CPU time: `stall_server.py`."""
    tracebacks: int = 0
    memory_mib: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    def weigh(self, pid: int) -> None:
        """Add the resources of its process now."""
        taken = resources(pid)
        if taken is not None:
            self.memory_mib.append(taken.memory_mib)
            self.threads.append(taken.threads)
            self.open_files.append(taken.open_files)

    @contextmanager
    def watching(self, server: ServerProcess) -> Iterator[None]:
        """Ask a server for its health again and again; in the end, read its log."""
        ended = threading.Event()
        with ThreadPoolExecutor(1) as watch:
            asking = watch.submit(self._ask, server, ended)
            try:
                yield
            finally:
                ended.set()
            asking.result()
        self.stalls += [line for line in server.log if line.startswith("stalled")]
        self.tracebacks += sum("Traceback" in line for line in server.log)

    def _ask(self, server: ServerProcess, ended: threading.Event) -> None:
        with server.client() as client:
            while not ended.wait(_EVERY_S) and server.process.poll() is None:
                start = time.monotonic()
                client.get("/health", timeout=PATIENCE_S)
                took = round(1000 * (time.monotonic() - start), 1)
                self.slowest_health_ms = max(self.slowest_health_ms, took)
