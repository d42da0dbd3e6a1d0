"""Policy of the queue: the requests that begin, and the prompt rows of a step.

Pure policy over small records: no model, and no clock except the times it is given.

Requests begin in the order in which they came. They wait only for a free slot and free cells. Cells
are promised for the prompt and a likely length of the answer, not for all of `max_tokens`: most
answers end long before, and empty cells would keep other requests waiting. If running sequences
outgrow the cells after all, the one that began last is suspended: it gives back its slot, keeps its
answer so far, and waits at the head of the queue. That costs only the time to decode its tokens
again. The oldest sequence always runs to its end, if necessary with all cells for itself.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.prefixes.reuse import common_prefix
from dflash_local.target_model.images import n_cells

LIKELY_ANSWER = 256
"""Tokens of an answer for which cells are promised when it begins."""
_GROWTH = 64
"""Tokens for which cells are promised when a longer answer is resumed."""
_STALL_S = 0.05
"""The longest delay of running answers by a chunk of a prompt, if a round is shorter."""
LEAST_ROWS = 32
"""The fewest rows of a chunk. A pass with fewer takes hardly less time."""
_LONGEST_RETRY_S = 600


@dataclass(frozen=True)
class Waiting:
    """A request without a slot. `cells`: see `cells_for`. `until`: when it stops waiting, on the
    same clock as `now`. `exclusive`: it needs the engine without any running sequence."""

    cells: int = 0
    until: float | None = None
    exclusive: bool = False

    def is_overdue(self, now: float) -> bool:
        return self.until is not None and now >= self.until


def cells_for(n_prompt: int, n_emitted: int, max_tokens: int | None, n_ctx: int) -> int:
    """Cells to promise a sequence: see above. At least one for each of its tokens, and at most
    `n_ctx`."""
    answer = max(LIKELY_ANSWER, n_emitted + _GROWTH)
    if max_tokens is not None:
        answer = min(answer, max_tokens)
    return min(n_prompt + answer, n_ctx)


def n_to_begin(waiting: Sequence[Waiting], n_running: int, n_slots: int, free_cells: int) -> int:
    """The number of requests to begin now from the queue's head. `free_cells` are not promised yet.

    If nothing is running, the first one always begins, so the queue never stands still.
    """
    n = 0
    for request in waiting:
        if request.exclusive:
            return n if n or n_running else 1
        if n_running + n >= n_slots:
            break
        free_cells -= request.cells
        if free_cells < 0 and n_running + n:
            break
        n += 1
    return n


def retry_after(durations: Sequence[float], n_slots: int) -> int:
    """The whole seconds, at least 1, after which a refused request should try again: when the first
    of `n_slots` requests is likely to end, judged by the `durations` of those that ended last."""
    if not durations:
        return 1
    seconds = round(statistics.median(durations) / n_slots)
    return min(max(seconds, 1), _LONGEST_RETRY_S)


def chunk_rows(n_batch: int, streaming: bool, rows_per_s: float, round_s: float) -> int:
    """The number of prompt rows that a step may decode.

    While other answers are `streaming`, few enough to delay these only for the time of a round, or
    for `_STALL_S` if that is longer. `rows_per_s` is 0 before it is known. The result is a multiple
    of 32, so that passes come in few sizes.
    """
    if not streaming:
        return n_batch
    rows = int(rows_per_s * max(_STALL_S, round_s)) // LEAST_ROWS * LEAST_ROWS
    return min(max(rows, LEAST_ROWS), n_batch)


def ahead(texts: Sequence[list[int]], n_cached: Sequence[int], least: int) -> list[int]:
    """Places of the prompts that go on. The others wait for an earlier prompt, which is about to
    decode at least `least` tokens that both begin with, and then take these over."""
    found: list[int] = []
    for i, text in enumerate(texts):
        for j in range(i):
            begin, end = max(n_cached[i], n_cached[j]), common_prefix(text, texts[j])
            # Images may take more cells than positions.
            if end - begin >= least or n_cells(text[begin:end]) >= least:
                break
        else:
            found.append(i)
    return found


def share_rows(left: Sequence[int], last_steps: Sequence[int], n_rows: int) -> list[int]:
    """The rows that each prompt may decode in this step, together at most `n_rows`. It has so many
    `left`, and its last ones were decoded in those of `last_steps`.

    The prompts that have waited longest come first, and the next one gets the rows that are left.
    So a short prompt waits for at most one chunk of each other one, and a long one always goes on.
    """
    rows = [0] * len(left)
    for i in sorted(range(len(left)), key=last_steps.__getitem__):
        rows[i] = min(left[i], n_rows)
        n_rows -= rows[i]
    return rows
