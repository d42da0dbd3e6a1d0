"""How much verifying in batches differs from decoding one token at a time on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local import disk_cache
from dflash_local.llama import runtime
from dflash_local.target.target import Target

WIDTHS = (2, 4, 8, 16)
DEPTHS = (32, 480)
"""Tokens of context before the rows that are compared: a few, and more than the 256 cells after
which kernels may split the context among threads."""

_BUDGET_S = 1.0
_BUDGET_STEPS = 32
_FORMAT = 1


@dataclass(frozen=True)
class Exactness:
    """`differences[depth][width]`: the largest difference of a logit between decoding `width` rows
    at once and one by one, after `depth` tokens of context."""

    differences: dict[int, dict[int, float]]

    def exact_width(self, depth: int) -> int:
        """The width up to which verify passes are exact to the bit at this depth; 1 if none is."""
        exact = 1
        for width, difference in sorted(self.differences[depth].items()):
            if difference != 0.0:
                break
            exact = width
        return exact

    def noise(self) -> float:
        """The largest difference seen. Answers may differ only where the top two are this close."""
        return max(
            (d for widths in self.differences.values() for d in widths.values()), default=0.0
        )

    def lines(self) -> list[str]:
        """The result in words, one line per depth."""
        texts = []
        for depth, widths in sorted(self.differences.items()):
            exact, widest = self.exact_width(depth), max(widths)
            text = f"after {depth} tokens: verifying is exact to the bit "
            if exact >= widest:
                text += f"up to width {widest}, the widest measured"
            else:
                beyond = max(d for width, d in widths.items() if width > exact)
                text += f"up to width {exact}; beyond, logits differ by up to {beyond:.3g}"
            texts.append(text)
        return texts

    def as_dict(self) -> dict[str, Any]:
        """For JSON; widths and depths as text."""
        return {
            str(depth): {
                "exact_width": self.exact_width(depth),
                "largest_difference": {str(width): d for width, d in widths.items()},
            }
            for depth, widths in sorted(self.differences.items())
        }


def measure_exactness(target: Target, *, before: Callable[[], None]) -> Exactness:
    """The exactness of `target`, kept on disk per machine, file, build and settings.

    Measuring takes a second, or 32 target steps if these take longer. `before` empties all caches
    of the target. It is called only if there is something to measure.
    """
    key = _key(target)
    with suppress(ValueError, AttributeError, TypeError):  # not measured yet, or damaged
        raw = disk_cache.read("exactness", key)
        return Exactness(
            {int(d): {int(w): float(x) for w, x in ws.items()} for d, ws in raw.items()}
        )
    before()
    try:
        found = _measure(target)
    finally:
        target.clear(0)
    disk_cache.write("exactness", key, found.differences)
    return found


def _measure(target: Target) -> Exactness:
    start = time.perf_counter()
    n = min(max(WIDTHS), target.n_batch)
    rng = np.random.default_rng(0)
    differences: dict[int, dict[int, float]] = {}
    steps = 0
    for depth in DEPTHS:
        depth = min(depth, target.n_ctx - n)
        cost = n + sum(n // width for width in WIDTHS if width <= n) + depth // target.n_batch + 1
        spent = time.perf_counter() - start
        if steps and (steps + cost > _BUDGET_STEPS and spent * (1 + cost / steps) > _BUDGET_S):
            break
        if depth < 1 or depth in differences:
            continue
        tokens = rng.integers(0, target.n_vocab, depth + n, dtype=np.int32)
        target.clear(0)
        for begin in range(0, depth, target.n_batch):
            _decode(target, tokens[:depth], begin, target.n_batch)
        single = _rows(target, tokens, depth, 1)
        differences[depth] = {
            width: float(np.abs(_rows(target, tokens, depth, width) - single).max())
            for width in WIDTHS
            if width <= n
        }
        steps += cost
    return Exactness(differences)


def _rows(target: Target, tokens: NDArray[np.int32], depth: int, width: int) -> NDArray[np.float32]:
    """Logits of the rows after `depth`, decoded `width` at a time; float32 [rows, n_vocab]."""
    target.truncate(0, depth)
    rows = []
    for begin in range(depth, len(tokens), width):
        _decode(target, tokens, begin, width)
        rows += [target.logits(i).copy() for i in range(min(width, len(tokens) - begin))]
    return np.stack(rows)


def _decode(target: Target, tokens: NDArray[np.int32], begin: int, width: int) -> None:
    chunk = tokens[begin : begin + width]
    last = begin + len(chunk)
    # The context's rows need no logits, and would not fit the output buffer.
    output = [width <= max(WIDTHS)] * len(chunk)
    target.decode(chunk, range(begin, last), [0] * len(chunk), output)


def _key(target: Target) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "machine": runtime.machine(),
        "threads": target.n_threads,
        "file": target.file_key,
        "options": asdict(target.options),
    }
