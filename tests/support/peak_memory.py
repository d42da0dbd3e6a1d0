"""For scripts that tests run in a process of their own: the most memory that it has had."""

# What getrusage tells on Linux counts the process, too, that started this one.
PEAK = """
import resource, sys
from pathlib import Path

def peak():
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
"""
"""Python text: `peak()` is in bytes."""
