"""What a server's process takes, on Linux, and how soon it says that it is well."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx


class Resources(NamedTuple):
    memory_mib: float
    """Resident."""
    threads: int
    open_files: int


def resources(pid: int) -> Resources | None:
    """What the process takes now; None where the system does not tell."""
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
    """How a server has fared."""

    slowest_health_ms: float = 0.0
    stalls: list[str] = field(default_factory=list)
    """Steps of the event loop that took long, in CPU time: tests/support/stall_server.py."""
    memory_mib: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    def weigh(self, pid: int) -> None:
        """What its process takes now."""
        taken = resources(pid)
        if taken is not None:
            self.memory_mib.append(taken.memory_mib)
            self.threads.append(taken.threads)
            self.open_files.append(taken.open_files)

    def ask(self, client: httpx.Client, **options: Any) -> None:
        """Ask for its health; `options` are those of httpx."""
        start = time.monotonic()
        client.get("/health", **options)
        took = round(1000 * (time.monotonic() - start), 1)
        self.slowest_health_ms = max(self.slowest_health_ms, took)
