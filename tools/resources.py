"""What a process takes, on Linux."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


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
