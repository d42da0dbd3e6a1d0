"""Who begins, who has waited too long, who makes room, and whose prompt goes on with how many rows.

Pure policy over small records: no model, and no clock but the times it is given.

Requests begin in the order in which they came, so none is overtaken for ever, and none waits for
anything but a free slot and free cells. Cells are promised for the prompt and for as much of the
answer as is likely, not for all that `max_tokens` permits: most answers end long before, and cells
that are kept empty for them would keep other requests waiting. Where running sequences outgrow the
cells after all, the one that began last steps aside: it gives back its slot, waits at the head of
the queue with all it has emitted, and goes on from there. Nothing is lost but the time to decode
its tokens again; and the oldest always runs to its end, if need be with all cells for itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.engine.reuse import common_prefix

LIKELY_ANSWER = 256
"""Tokens of an answer for which cells are promised when it begins."""
_GROWTH = 64
"""Tokens for which they are when it has passed that, and goes on after it stepped aside."""
_STALL_S = 0.05
"""How long a chunk of a prompt should hold up the streams beside it, where a round is shorter."""
LEAST_ROWS = 32
"""Of a chunk: with fewer, a pass takes hardly less time."""
_LONGEST_RETRY_S = 600


@dataclass(frozen=True)
class Waiting:
    """A request that has no slot. `cells` is what `cells_for` says; `until`, on the clock of `now`,
    is when its time to wait is over; `alone` wants the engine without any sequence at work."""

    cells: int = 0
    until: float | None = None
    alone: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt with `left` rows to decode, which had its last rows in step `turn`."""

    left: int
    turn: int


def cells_for(n_prompt: int, n_emitted: int, max_tokens: int | None, n_ctx: int) -> int:
    """Cells to promise a sequence: see above. Never more than there are, and never fewer than it
    has tokens, as far as these fit."""
    answer = max(LIKELY_ANSWER, n_emitted + _GROWTH)
    if max_tokens is not None:
        answer = min(answer, max_tokens)
    return min(n_prompt + answer, n_ctx)


def n_to_begin(waiting: Sequence[Waiting], n_running: int, n_slots: int, free_cells: int) -> int:
    """How many, from the head of the queue, begin now. `free_cells` are promised to nobody.

    Where nothing runs the first one always does, so the queue never stands still.
    """
    n = 0
    for request in waiting:
        if request.alone:
            return n if n or n_running else 1
        if n_running + n >= n_slots:
            break
        free_cells -= request.cells
        if free_cells < 0 and n_running + n:
            break
        n += 1
    return n


def overdue(waiting: Sequence[Waiting], now: float) -> list[int]:
    """Places in the queue of those whose time to wait is over."""
    return [i for i, w in enumerate(waiting) if w.until is not None and now >= w.until]


def retry_after(durations: Sequence[float], n_slots: int) -> int:
    """Whole seconds, 1 or more, after which a request that was turned away may find a place: when
    the first of `n_slots` ends, going by how long those took that ended lately."""
    if not durations:
        return 1
    seconds = round(statistics.median(durations) / n_slots)
    return min(max(seconds, 1), _LONGEST_RETRY_S)


def chunk_rows(n_batch: int, streaming: bool, rows_per_s: float, round_s: float) -> int:
    """How many rows of prompts a step may decode.

    Beside streams few enough that they stall for a moment only: as long as a round takes, or
    `_STALL_S` where that is longer. `rows_per_s` is 0 before it is known. In multiples of 32, so
    that passes come in few sizes.
    """
    if not streaming:
        return n_batch
    rows = int(rows_per_s * max(_STALL_S, round_s)) // LEAST_ROWS * LEAST_ROWS
    return min(max(rows, LEAST_ROWS), n_batch)


def ahead(texts: Sequence[list[int]], n_cached: Sequence[int], least: int) -> list[int]:
    """Places of the prompts that go on. The others wait for one before them, which is about to
    decode `least` or more tokens that are theirs as well, and which they then take over."""
    found: list[int] = []
    for i, text in enumerate(texts):
        for j in range(i):
            n = common_prefix(text, texts[j]) - max(n_cached[i], n_cached[j])
            if n >= least:
                break
        else:
            found.append(i)
    return found


def share_rows(prompts: Sequence[Prompt], n_rows: int) -> list[int]:
    """The rows that each prompt may decode in this step, together at most `n_rows`.

    Those that were served longest ago come first, and what one leaves goes to the next: a short
    prompt waits for at most one chunk of each other one, and a long one always comes to its turn.
    """
    rows = [0] * len(prompts)
    for i in sorted(range(len(prompts)), key=lambda i: prompts[i].turn):
        rows[i] = min(prompts[i].left, n_rows)
        n_rows -= rows[i]
    return rows
