"""The number of threads of a target's passes: fewer where other processes want the cores."""

import math
from typing import Any

from dflash_local.llama import native
from dflash_local.llama.runtime import api
from dflash_local.llama.spare_cores import SpareCores
from dflash_local.target_model.options import TargetOptions

_LIGHT, _ROWS_AS_ONE = 8 << 20, 4
"""Bytes of weights for each thread and layer. With 1.5 MB, fewer threads are up to three times as
fast beside busy processes; with 70 MB all of them are, by a fourth. Four rows take about as long as
one."""
_FEW_CELLS, _SPLIT_TYPES = 256, ("f16", "f32")  # of ggml-cpu's flash attention


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
