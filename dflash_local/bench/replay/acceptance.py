"""Drafts of a given text, as good as those that were recorded from a trained pair.

For drafters whose own drafts mean nothing: their candidates are replaced such that the token of the
given text has the rank that the recorded one had. Each place of a text has a place in the recorded
passages. So it is as hard to draft in all variants, whatever they draft before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from dflash_local.bench.synthetic.passages import Passages
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft


class ReplayedDrafts:
    """Puts the tokens of given texts into drafts."""

    def __init__(self, recorded: RecordedDrafts, length: float, seed: int) -> None:
        """`length`: tokens of a round of whole chains. Raises InputError for an impossible one."""
        self._recorded = recorded
        self._passages = Passages(recorded, length, seed)
        self._drawn: list[int] = []
        self._next_place = 0

    def restart(self, n_tokens: int = 0) -> None:
        """The next answer begins where one of so many tokens would have ended."""
        self._next_place = n_tokens

    def begin(self, n_tokens: int) -> int:
        """The place of an answer's first token."""
        place = self._next_place
        self._next_place += n_tokens
        return place

    def mark(self, draft: Draft, text: Sequence[int], place: int) -> Draft:
        """A drafter's chain for the tokens `text`, the first of which is at `place`, with recorded
        confidence. In a block that is longer than the recorded ones, the last position of theirs is
        repeated."""
        known = draft.candidates
        ids = known.ids.copy() if known else np.array(draft.tokens, np.int32)[:, None]
        n_drafts, k = self._recorded.logprobs.shape[2:]
        ids = ids[:, :k]
        passage, at = divmod(place, self._recorded.n_tokens)
        while len(self._drawn) <= passage:
            self._drawn.append(self._passages.draw())
        here = self._drawn[passage], at, np.minimum(np.arange(len(ids)), n_drafts - 1)
        logprobs = self._recorded.logprobs[here][:, : ids.shape[1]]
        ranks = self._recorded.ranks[here].tolist()
        for row, rank, token in zip(ids, ranks, text, strict=False):  # a text may end earlier
            row[:] = with_rank(row.tolist(), rank, token)
        n = len(draft)
        return replace(
            draft,
            tokens=ids[:n, 0].tolist(),
            logprobs=logprobs[:n, 0].tolist(),
            candidates=Candidates(ids, logprobs),
        )


def with_rank(row: Sequence[int], rank: int, token: int) -> list[int]:
    """Different candidates, of which `token` is the one of this rank; none if there is no such
    rank."""
    found = list(row)
    if token in found:
        at = found.index(token)
        found[at] = found[rank] if rank < len(found) else _other(found)
    if rank < len(found):
        found[rank] = token
    return found


def _other(row: Sequence[int]) -> int:
    return next(token for token in count() if token not in row)
