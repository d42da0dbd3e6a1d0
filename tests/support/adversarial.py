"""Drafters that know the answer, or know nothing, or break their promises. All are real drafters
to the engine: they hold what is injected, and answer by a script instead of by a network."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest

Script = Callable[[int, int, int], Draft]
"""From the position of the anchor, the anchor and the number of tokens asked for to a draft."""


class ScriptedDrafter(Drafter):
    """Drafts what `script` says. Checks that the engine keeps its side of the protocol."""

    def __init__(self, script: Script, *, block_size: int = 16, n_seq: int = 1) -> None:
        self.script = script
        self.drafts = 0
        self._block_size = block_size
        self._lengths = [0] * n_seq

    @property
    def block_size(self) -> int:
        return self._block_size

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def inject(self, seq: int, features: NDArray[np.float32]) -> None:
        assert features.ndim == 2 and features.dtype == np.float32
        assert np.isfinite(features).all()
        self._lengths[seq] += len(features)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        seqs = [request.seq for request in requests]
        assert len(set(seqs)) == len(seqs)
        self.drafts += len(requests)
        drafts = []
        for request in requests:
            assert 1 <= request.n_draft < self._block_size
            self.inject(request.seq, request.features)
            anchor_at = self._lengths[request.seq]
            drafts.append(self.script(anchor_at, request.anchor, request.n_draft))
        return drafts

    def truncate(self, seq: int, length: int) -> None:
        self._lengths[seq] = min(length, self._lengths[seq])

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self._lengths[source]
        self._lengths[target] = length

    def close(self) -> None:
        self._lengths = [0] * len(self._lengths)


def oracle(text: Sequence[int]) -> Script:
    """Always right, where `text` is prompt and answer of plain decoding."""

    def script(anchor_at: int, anchor: int, n: int) -> Draft:
        # The anchor is the first token that no cache holds: caches and answer are in step.
        assert text[anchor_at] == anchor
        return Draft.chain(text[anchor_at + 1 : anchor_at + 1 + n])

    return script


def right_for(text: Sequence[int], k: Callable[[], int], n_vocab: int) -> Script:
    """Right for `k()` tokens, and wrong from there to the end of what is asked for."""
    know = oracle(text)

    def script(anchor_at: int, anchor: int, n: int) -> Draft:
        right = know(anchor_at, anchor, n).tokens
        right += [0] * (n - len(right))  # what follows the answer is neither right nor wrong
        good = min(k(), n)
        return Draft.chain(right[:good] + [(token + 1) % n_vocab for token in right[good:]])

    return script


def always_wrong(text: Sequence[int], n_vocab: int) -> Script:
    return right_for(text, lambda: 0, n_vocab)


def forked(right: Sequence[int], n_vocab: int) -> Draft:
    """A tree of right tokens, each after a wrong one."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = ANCHOR
    for token in right:
        tokens += [(token + 1) % n_vocab, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    return Draft(tokens, parents)
