"""Passes of a bare target, without an engine. Most use sequence 0 alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.target_model.batch import Batch, Outputs
from dflash_local.target_model.target import Target


def decode(target: Target, begin: int, tokens: Sequence[int], outputs: Outputs = "all") -> None:
    """One pass over tokens that follow one another from position `begin` on."""
    batch = Batch()
    batch.add(0, begin, tokens, outputs=outputs)
    target.run(batch)


def prefill(target: Target, tokens: Sequence[int]) -> int:
    """Decode a prompt in batches, as an engine does; returns the last token's row in its batch."""
    n = 0
    for begin in range(0, len(tokens), target.n_batch):
        n = len(tokens[begin : begin + target.n_batch])
        decode(target, begin, tokens[begin : begin + n], "last")
    return n - 1


def takes_back(target: Target) -> bool:
    """Whether the widest pass of all sequences of an empty target can be taken back, but for the
    first row of each. Only then is it known whether rows are replayed on this device."""
    room = min(target.n_batch, target.n_ctx)
    seqs = range(max(1, min(target.options.n_seq, room // 2)))  # of one row each, nothing is seen
    width = min(target.max_width, room // len(seqs))
    batch = Batch()
    for seq in seqs:
        batch.add(seq, 0, [token % target.n_vocab for token in range(width)])
    target.run(batch)
    found = all(target.shortest(seq) == 1 for seq in seqs)
    for seq in seqs:
        target.clear(seq)
    return found


def rows_of(
    target: Target, begin: int, tokens: Sequence[int], width: int
) -> list[NDArray[np.float32]]:
    """Logits of each of these tokens' rows, decoded `width` rows at a time; float32 [n_vocab]."""
    rows = []
    for i in range(0, len(tokens), width):
        chunk = tokens[i : i + width]
        decode(target, begin + i, chunk)
        rows += [target.logits(row).copy() for row in range(len(chunk))]
    return rows
