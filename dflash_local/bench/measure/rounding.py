"""Whether rounding explains that two greedy answers part: the lead of a token against the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_local.target.batch import Batch
from dflash_local.target.target import Target


@dataclass(frozen=True)
class Lead:
    """Of the likeliest token after a text over the second, and how far logits move by rounding.

    `gap` is the difference of the two logits, decoded one token at a time; `noise` the largest
    difference of a logit, anywhere in the text, to decoding several tokens at a time.
    """

    gap: float
    noise: float

    @property
    def is_within_rounding(self) -> bool:
        """Whether batched rows can swap the two: each of them may move by the noise."""
        return self.gap <= 2 * self.noise


def lead_after(
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    widths: Sequence[int],
    *,
    forked: bool = False,
) -> Lead:
    """The lead after `prompt` and `answer`, the answer decoded one by one and `widths` at a time;
    `forked`, also as the path through trees of such widths, whose cells lie in another order.

    Uses sequence 0, which must be empty and is empty again afterwards.
    """
    try:
        last = _prefill(target, prompt)
        single = np.stack([last, *_steps(target, prompt, answer, 1)])
        noise = 0.0
        for width in widths if answer else ():
            for steps in (_steps, _forked_steps) if forked and width > 2 else (_steps,):
                target.truncate(0, len(prompt))
                batched = np.stack(steps(target, prompt, answer, width))
                noise = max(noise, float(np.abs(batched - single[1:]).max()))
        second, first = np.partition(single[-1], -2)[-2:]
        return Lead(float(first - second), noise)
    finally:
        target.clear(0)


def _prefill(target: Target, prompt: Sequence[int]) -> NDArray[np.float32]:
    """Decode the prompt as an engine does; logits of its last row, float32 [n_vocab]."""
    n = 0
    for begin in range(0, len(prompt), target.n_batch):
        chunk = prompt[begin : begin + target.n_batch]
        n = len(chunk)
        last = begin + n == len(prompt)
        target.decode(chunk, range(begin, begin + n), [0] * n, [False] * (n - 1) + [last])
    last_row: NDArray[np.float32] = target.logits(n - 1).copy()
    return last_row


def _steps(
    target: Target, prompt: Sequence[int], answer: Sequence[int], width: int
) -> list[NDArray[np.float32]]:
    """Logits of each row of the answer, decoded `width` rows at a time."""
    rows = []
    for begin in range(0, len(answer), width):
        chunk = answer[begin : begin + width]
        n, position = len(chunk), len(prompt) + begin
        target.decode(chunk, range(position, position + n), [0] * n, [True] * n)
        rows += [target.logits(i).copy() for i in range(n)]
    return rows


def _forked_steps(
    target: Target, prompt: Sequence[int], answer: Sequence[int], width: int
) -> list[NDArray[np.float32]]:
    """The same, each token but an anchor with a sibling before it that is not kept."""
    rows = []
    n_path = 1 + (width - 1) // 2
    for begin in range(0, len(answer), n_path):
        anchor, *drafts = answer[begin : begin + n_path]
        tokens = [token for draft in drafts for token in ((draft + 1) % target.n_vocab, draft)]
        parents = [node // 2 * 2 - 1 for node in range(len(tokens))]
        batch = Batch()
        part = batch.add_tree(0, len(prompt) + begin, anchor, tokens, parents)
        target.run(batch)
        path = range(0, len(batch), 2)
        rows += [target.logits(row).copy() for row in path]
        target.keep(part, path)
    return rows
