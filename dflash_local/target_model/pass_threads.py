"""The number of threads of a target's passes: fewer where other processes want the cores.

At each operation of a graph the threads wait for one another. If another process has the core of
one of them, all wait: two threads beside one busy process are slower than one.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_local.llama import native
from dflash_local.llama.runtime import api
from dflash_local.target_model.options import TargetOptions

_LIGHT, _ROWS_AS_ONE = 8 << 20, 4
"""Bytes of weights for each thread and layer. With 1.5 MB, fewer threads are up to three times as
fast beside busy processes; with 70 MB all of them are, by a fourth. Four rows take about as long as
one."""
_FEW_CELLS, _SPLIT_TYPES = 256, ("f16", "f32")  # of ggml-cpu's flash attention

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


class PassThreads:
    """For one context."""

    def __init__(
        self,
        model: Any,
        context: Any,
        pool: native.ThreadPool,
        options: TargetOptions,
        n_most: int,
        n_ctx: int,
    ) -> None:
        """`n_most` threads are in the pool; they stay if `options` ask for a number."""
        self._context, self._pool, self._n_most = context, pool, n_most
        self.cores = SpareCores(n_most) if options.n_threads is None else None
        self.computing = n_most, n_most
        """Those of passes of one row, and of others."""
        n_bytes = api.llama_model_size(model) / (api.llama_model_n_layer(model) * n_most)
        # Threads wait for one another after each operation of a pass. Where these are long beside
        # the system's slices of time, those that have a core do more of the work, and all threads
        # together get a larger share of the cores.
        self._light_rows = _ROWS_AS_ONE * _LIGHT / n_bytes if n_bytes < _LIGHT else 0.0
        self._whole_until = _whole_until(options, n_ctx)

    def before_pass(self, n_rows: int, end: int) -> None:
        """The next pass has so many rows, and ends before position `end`."""
        if self.cores is None:
            return
        n = self.cores.n_threads() if n_rows < self._light_rows else self._n_most
        computing = self._n_most if end > self._whole_until else n, n
        if computing != self.computing:
            self.computing = computing
            api.llama_set_n_threads(self._context, *computing)
            self._pool.use(n)


def _whole_until(options: TargetOptions, n_ctx: int) -> float:
    """The position up to which passes of one row may have fewer threads.

    Beyond, ggml splits the context of such a row among the threads, and its parts round by their
    number; it does from 512 cells on, which llama.cpp counts by 256. That matters only for exact
    results: in these caches a row rounds by the rows beside it, too."""
    whole = any(kv_type in _SPLIT_TYPES for kv_type in options.kv_types)
    splits = options.flash_attn and whole and n_ctx > _FEW_CELLS
    if not options.exact or not splits:
        return math.inf
    return _FEW_CELLS if options.n_branches == 1 else 0
