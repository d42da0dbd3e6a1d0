"""The memory and the cores of the host that this process may use."""

import ctypes
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number just below 2**63


def default_threads() -> int:
    """Number of physical cores that this process may use. With more threads ggml is slower."""
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


def give_back_memory() -> None:
    """Give the system the freed memory that the C library keeps, tens of MiB for each model that
    was closed. Only glibc keeps so much, and has a function for it."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def host_memory(fallback: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """(available, total) bytes; `fallback` if the operating system does not tell.

    Memory that the system can take back from its page cache counts as available.
    """
    available, total = _machine(fallback)
    for limit, used in _cgroups():
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return min(available, total), total


def _machine(fallback: tuple[int, int]) -> tuple[int, int]:
    found = parse_meminfo(_read(Path("/proc/meminfo")))
    if found is None and sys.platform == "darwin":
        found = _darwin()
    return found or _sysconf() or fallback


def parse_meminfo(text: str) -> tuple[int, int] | None:
    """(available, total) bytes from the text of /proc/meminfo; None if a line is missing."""
    found = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    if "MemTotal" not in found or "MemAvailable" not in found:
        return None
    return found["MemAvailable"], found["MemTotal"]


def parse_vm_stat(text: str) -> int | None:
    """Available bytes from the output of macOS's `vm_stat`: free, inactive and purgeable pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"^Pages ([\w ]+):\s+(\d+)", text, re.M))
    if not size or "free" not in pages:
        return None
    kinds = ("free", "inactive", "purgeable", "speculative")
    return int(size[1]) * sum(int(pages.get(kind, 0)) for kind in kinds)


def _darwin() -> tuple[int, int] | None:
    try:
        text = subprocess.run(
            ["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    available, pages = parse_vm_stat(text), _sysconf()
    return (available, pages[1]) if available is not None and pages else None


def _sysconf() -> tuple[int, int] | None:
    if sys.platform == "win32":
        return None
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return (total, total) if total > 0 else None


def _cgroups() -> list[tuple[int, int]]:
    """(limit, used) bytes of every memory limit that holds for this process, cgroup v2 and v1."""
    if sys.platform != "linux":
        return []
    return cgroup_limits(_read(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))


def cgroup_limits(membership: str, root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes for each limited group that `membership` (/proc/self/cgroup) names.

    A parent's limit holds for its children. In a container the named folder may not exist; the
    root of the mount is then the container's own group, so it is always read.
    """
    limits = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in [base / group, *(base / parent for parent in group.parents)]:
            limit = _number(folder / names[0])
            if limit is None or limit >= _UNLIMITED:
                continue
            cache = re.search(rf"^{names[2]} (\d+)", _read(folder / "memory.stat"), re.M)
            used = (_number(folder / names[1]) or 0) - (int(cache[1]) if cache else 0)
            limits.append((limit, max(0, used)))
    return limits


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
