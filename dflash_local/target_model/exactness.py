"""The difference between verifying in batches and one token at a time on this machine."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local import disk_cache
from dflash_local.errors import InputError
from dflash_local.fit.options import MAX_OUTPUT_ROWS
from dflash_local.target_model.bare_pass import prefill, rows_of
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import StateCheckpoint, Target

WIDTHS = (2, 4, 8, 16)
DEPTHS = (32, 480)
"""Tokens of context before the rows that are compared: a few, and more than the 256 cells after
which kernels may split the context among threads."""

_DEPTH_BESIDE, _ROWS_BESIDE = 272, 8
"""Tokens before the rows that are compared with rows beside others, and the most of these rows."""

_BUDGET_S = 2.0
_MOST_ROWS = 2048
_FORMAT = 2


@dataclass(frozen=True)
class Exactness:
    """`differences[depth][width]`: the largest difference of a logit between decoding `width` rows
    at once and one by one, after `depth` tokens of context, in `n_rows[depth]` rows of random
    tokens. Rows that were not tried may differ. `others`: the effect of other requests, before this
    one and beside it, on an answer, in the mode in which the model was loaded."""

    differences: dict[int, dict[int, float]]
    n_rows: dict[int, int]
    others: str = ""

    def exact_width(self, depth: int) -> int:
        """The width up to which no row of verify passes differed at this depth; 1 if none."""
        exact = 1
        for width, difference in sorted(self.differences[depth].items()):
            if difference != 0.0:
                break
            exact = width
        return exact

    def noise(self) -> float:
        """The largest difference seen. Answers may differ only where twice that separates the top
        two, or where another expert of a mixture is chosen."""
        return max(
            (d for widths in self.differences.values() for d in widths.values()), default=0.0
        )

    def lines(self) -> list[str]:
        """The result in words: one line per depth, and one on other requests."""
        texts = []
        for depth, widths in sorted(self.differences.items()):
            exact, widest = self.exact_width(depth), max(widths)
            text = f"after {depth} tokens: of {self.n_rows[depth]} rows none differed by a bit "
            text += f"when verified at widths up to {exact}"
            if exact >= widest:
                text += ", the widest measured"
            else:
                beyond = max(d for width, d in widths.items() if width > exact)
                text += f"; beyond, logits differ by up to {beyond:.3g}"
            texts.append(text)
        return [*texts, self.others] if self.others else texts

    def as_dict(self) -> dict[str, Any]:
        """For JSON; widths and depths as text."""
        return {
            str(depth): {
                "exact_width": self.exact_width(depth),
                "rows": self.n_rows[depth],
                "largest_difference": {str(width): d for width, d in widths.items()},
            }
            for depth, widths in sorted(self.differences.items())
        }


def measure_exactness(target: Target, *, before: Callable[[], None]) -> Exactness:
    """The exactness of `target`, kept per machine, file, build and settings.

    Takes two seconds or 2,048 rows, and 16 rows where those take longer. `before` empties all
    caches of the target: called only if there is something to measure.
    """
    key = {
        "format": _FORMAT,
        "machine": target.machine(),
        "threads": target.n_threads,
        "file": target.file_key,
        "options": asdict(target.options),
    }
    with suppress(ValueError, AttributeError, TypeError, KeyError):  # not measured, or damaged
        raw = disk_cache.read("exactness", key)
        return Exactness(
            {int(d): {int(w): float(x) for w, x in ws.items()} for d, ws in raw["max"].items()},
            {int(depth): int(n) for depth, n in raw["rows"].items()},
        )
    before()
    try:
        found = _measure(target)
    finally:
        target.clear(0)
    disk_cache.write("exactness", key, {"max": found.differences, "rows": found.n_rows})
    return found


def check_others(target: Target) -> None:
    """Refuse a target whose rows round by the rows of other sequences beside them, in an empty
    context of several. Raises InputError."""
    n_seq = target.options.n_seq
    n = max(min(_ROWS_BESIDE, MAX_OUTPUT_ROWS // n_seq, target.n_batch // n_seq), 1)
    depth = max(min(_DEPTH_BESIDE, target.n_ctx - n), 1)
    tokens = np.random.default_rng(0).integers(0, target.n_vocab, depth + n).tolist()
    prefill(target, tokens[:depth])
    alone = np.stack(rows_of(target, depth, tokens[depth:], 1))
    target.truncate(0, depth)
    batch = Batch()
    for seq in range(n_seq):
        batch.add(seq, 0 if seq else depth, tokens[depth:])
    target.run(batch)
    beside = np.stack([target.logits(row) for row in range(n)])
    for seq in range(n_seq):
        target.clear(seq)
    if difference := np.abs(beside - alone).max():
        raise InputError(
            f"exact answers to {n_seq} requests at once need rows that round alike beside others, "
            f"and here a logit moves by {difference:.2g}: that takes an NVIDIA GPU or, on a CPU, "
            "Q8_0 weights and kv_type q8_0; else give n_seq=1"
        )


def with_isolation_note(found: Exactness, target: Target, *, exact: bool) -> Exactness:
    """With the note on other requests in this target's mode. `exact`: requests use
    nothing of earlier ones but whole batches."""
    # Whether a row is computed from its own sequence alone.
    own = target.rounds_alone and (exact or target.options.kv_types == ("q8_0", "q8_0"))
    others = "other requests, before it and beside it, may change the last bits of an answer"
    if own and found.noise() == 0.0:  # at any width it is the same
        others = "other requests, before it and beside it, change nothing of an answer"
    elif own and exact:
        others = "other requests change nothing of a plain answer, of a drafted one the last bits"
    return replace(found, others=others)


def _measure(target: Target) -> Exactness:
    end = time.perf_counter() + _BUDGET_S
    n = min(max(WIDTHS), target.n_batch)
    widths = [width for width in WIDTHS if width <= n]
    depths = dict.fromkeys(min(depth, target.n_ctx - n) for depth in DEPTHS)
    rng = np.random.default_rng(0)
    found = Exactness({}, {})
    for i, depth in enumerate(depths):
        begun = time.perf_counter()
        if depth < 1 or (i and begun >= end):
            continue
        target.clear(0)
        prefill(target, rng.integers(0, target.n_vocab, depth).tolist())
        start = target.checkpoint(0, depth)
        differences = found.differences[depth] = dict.fromkeys(widths, 0.0)
        found.n_rows[depth] = 0
        share = begun + (end - begun) / (len(depths) - i)
        while found.n_rows[depth] < _MOST_ROWS:
            tokens = rng.integers(0, target.n_vocab, n).tolist()
            single = _rows(target, start, tokens, 1)
            for width in widths:
                difference = float(np.abs(_rows(target, start, tokens, width) - single).max())
                differences[width] = max(differences[width], difference)
            found.n_rows[depth] += n
            if time.perf_counter() >= share:
                break
    return found


def _rows(
    target: Target, start: StateCheckpoint, tokens: list[int], width: int
) -> NDArray[np.float32]:
    """Logits of these rows from `start` on, decoded `width` at a time; float32 [rows, n_vocab]."""
    target.restore(0, start)
    return np.stack(rows_of(target, start.length, tokens, width))
