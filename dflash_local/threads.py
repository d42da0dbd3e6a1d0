"""How many threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """Physical cores that this process may use: more threads than that slow ggml down."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not on this system
        return max(1, (os.cpu_count() or 2) // 2)
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            return len(usable)
    return len(cores)
