"""The number of threads that compute, by the cores that other processes leave free.

At each operation of a graph the threads wait for one another. If another process has the core of
one of them, all wait: two threads beside one busy process are slower than one.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.25
"""Less, and the system's ticks of 10 ms say too little; more, and a change is noticed late."""
_STALE_S = 2.0
"""After a pause the looks before it say nothing."""
_LESS, _MORE = 0.5, 0.3
"""Of a core that others must take for one thread less, and may take when there is one more again.
On two cores half a core is where one thread and two are equally fast; the gap between the two keeps
the number still."""


@dataclass(frozen=True)
class CpuTime:
    """Seconds since some start: of the clock, of all work on our CPUs, of our own work there."""

    clock: float
    all: float
    own: float
    n_cpus: int


def cpu_time() -> CpuTime | None:
    """Now. None if the system does not tell. Work of low priority (`nice`) counts where ours is
    such work, too: else it gives way."""
    try:
        ours = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        rows = [line.split() for line in lines if line.partition(" ")[0] in ours]
        columns = [1, 3, 6, 7]  # of user, nice, system, idle, iowait, irq, softirq
        if os.nice(0) > 0:
            columns.append(2)
        ticks = sum(int(row[i]) for row in rows for i in columns)
        all_s = ticks / os.sysconf("SC_CLK_TCK")
        return CpuTime(time.monotonic(), all_s, time.process_time(), len(rows))
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def n_beside(n_now: int, n_most: int, n_cpus: int, others: float) -> int:
    """The threads that compute beside other processes, which take `others` of `n_cpus` CPUs.

    Never fewer than half of `n_most`: that is a fair share, and two such processes beside one
    another would else drive each other down.
    """
    free = n_cpus - others
    wanted = min(n_now, int(free + _LESS))
    wanted = max(wanted, int(free + _MORE))
    return max((n_most + 1) // 2, min(n_most, wanted))


class SpareCores:
    """Looks now and then how busy the CPUs of this process are. `n_threads` is the answer."""

    def __init__(self, n_most: int, now: Callable[[], CpuTime | None] = cpu_time) -> None:
        self._n_most, self._now = n_most, now
        self._n = n_most
        self._before = now() if n_most > 1 else None
        self._clock = time.monotonic()

    def n_threads(self) -> int:
        """For the next pass; called before each."""
        if self._before is None or time.monotonic() - self._clock < _LOOK_S:
            return self._n
        before, now = self._before, self._now()
        self._before, self._clock = now, time.monotonic()
        if now is not None and _LOOK_S / 2 <= now.clock - before.clock <= _STALE_S:
            took = now.clock - before.clock
            others = max(0.0, (now.all - before.all) - (now.own - before.own)) / took
            self._n = n_beside(self._n, self._n_most, now.n_cpus, others)
        return self._n
