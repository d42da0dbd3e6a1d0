"""Whether rounding explains that greedy answers differ: the lead of a token against the noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_local.target_model.bare_pass import prefill, rows_of
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import Target


@dataclass(frozen=True)
class Lead:
    """The lead of the likeliest token after a text, and the movement of logits by rounding.

    `gap` is the difference of the two largest logits, decoded one token at a time. `noise` is the
    largest change of a logit, anywhere in the text, when several tokens are decoded at a time: in
    passes of so many rows, the last one, too, as a draft may be longer than what comes of it.
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
    """The lead after `prompt` and `answer`. The answer is decoded one token at a time and `widths`
    at a time; with `forked`, also as the path through trees of such widths, whose cells lie in
    another order.

    Uses sequence 0, which must be empty and is empty again afterwards.
    """
    try:
        last_row, n = prefill(target, prompt), len(prompt)
        start = target.checkpoint(0, n)
        single = np.stack([target.logits(last_row).copy(), *rows_of(target, n, answer, 1)])
        noise = 0.0
        for width in widths if answer else ():
            fits = 2 < width < 2 * target.options.n_branches  # every other node is a leaf
            whole = [*answer, *list(answer[:1]) * (-len(answer) % width)][: target.n_ctx - n]
            for logits in (rows_of, _tree_rows) if forked and fits else (rows_of,):
                target.restore(0, start)
                batched = np.stack(logits(target, n, whole, width)[: len(answer)])
                noise = max(noise, float(np.abs(batched - single[1:]).max()))
        second, first = np.partition(single[-1], -2)[-2:]
        return Lead(float(first - second), noise)
    finally:
        target.clear(0)


def _tree_rows(
    target: Target, begin: int, tokens: Sequence[int], width: int
) -> list[NDArray[np.float32]]:
    """As `rows_of`, but each token except an anchor follows a sibling that is not kept."""
    rows = []
    n_path = 1 + (width - 1) // 2
    for at in range(0, len(tokens), n_path):
        anchor, *drafts = tokens[at : at + n_path]
        nodes = [token for draft in drafts for token in ((draft + 1) % target.n_vocab, draft)]
        parents = [node // 2 * 2 - 1 for node in range(len(nodes))]
        batch = Batch()
        part = batch.add_tree(0, begin + at, anchor, nodes, parents)
        target.run(batch)
        path = range(0, len(batch), 2)
        rows += [target.logits(row).copy() for row in path]
        target.keep(part, path)
    return rows
