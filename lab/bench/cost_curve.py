"""The cost of a pass of the target, by its number of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from dflash_local.controller.calibration import budget_s
from dflash_local.target_model.bare_pass import decode, prefill
from dflash_local.target_model.target import Target

DEPTH = 256
"""Tokens of context in which the cost of a pass is measured."""

_TIMED, _LEAST_TIMED = 7, 2
"""Passes of each width. All of them would take minutes where a wide pass takes seconds, as with
large models on a CPU."""


def cost_curve(target: Target, widths: Sequence[int], *, depth: int = DEPTH) -> dict[int, float]:
    """Median seconds of a pass by its number of rows, after `depth` tokens.

    Takes about as long as a calibration may, or three passes of each width. Uses sequence 0, which
    must be empty and is empty again afterwards.
    """
    enough_s = budget_s() / len(widths)
    depth = max(1, min(depth, target.n_ctx - max(widths)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, target.n_vocab, depth + max(widths)).tolist()
    found = {}
    try:
        prefill(target, tokens[:depth])
        before = target.checkpoint(0, depth)
        for width in widths:
            decode(target, depth, tokens[depth : depth + width])
            target.restore(0, before)
            # The pass above built the graph of this width, as the first of many equal rounds does.
            times: list[float] = []
            while len(times) < _LEAST_TIMED or (len(times) < _TIMED and sum(times) < enough_s):
                start = time.perf_counter()
                decode(target, depth, tokens[depth : depth + width])
                times.append(time.perf_counter() - start)
                target.restore(0, before)
            found[width] = float(np.median(times))
    finally:
        target.clear(0)
    return found
