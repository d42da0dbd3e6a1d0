"""Drafts of a given text, as good as those that were recorded from a trained pair.

For drafters whose own drafts mean nothing: their candidates are replaced such that the token of the
given text has the rank that the recorded one had. An answer walks through recorded passages, each
of which begins with a round: through the same ones in all variants, so that all find it as hard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from dflash_local.draft.draft import Candidates, Draft
from lab.replay.recorded import RecordedDrafts

_STRATA = 16


@dataclass
class Walk:
    """The place of an answer: in the passage of this number, since it had so many tokens."""

    number: int
    since: int = 1  # the first one is from the prompt's last row


class ReplayedDrafts:
    """Puts the tokens of given texts into drafts.

    Recorded passages come in random order, stratified by the length of their rounds, so that the
    mean of a short run is close to that of a long one.
    """

    def __init__(self, length: float, seed: int, n_whole: int | None = None) -> None:
        """`length`: tokens of a round of whole chains, of `n_whole` drafts (None: of all recorded
        ones). Raises InputError for an impossible one."""
        self._recorded = RecordedDrafts.shipped()
        self._order = np.argsort(self._recorded.kept.mean(axis=1), kind="stable")
        self._shares = np.cumsum(self._recorded.weights(length, n_whole)[self._order])
        self._random = np.random.default_rng(seed)
        self._drawn: list[int] = []
        self._n_begun = 0

    def begin(self, n_tokens: int) -> Walk:
        """The walk of another answer of so many tokens, through passages of its own."""
        begun = Walk(self._n_begun)
        self._n_begun += 1 + n_tokens // self._recorded.n_tokens
        return begun

    def mark(self, draft: Draft, answer: Sequence[int], n_tokens: int, walk: Walk) -> Draft:
        """A drafter's chain after the first `n_tokens` of `answer`, with recorded confidence. In a
        block that is longer than the recorded ones, the last position of theirs is repeated."""
        if n_tokens - walk.since >= self._recorded.n_tokens:
            walk.number, walk.since = walk.number + 1, n_tokens
        known = draft.candidates
        ids = known.ids.copy() if known else np.array(draft.tokens, np.int32)[:, None]
        n_drafts, k = self._recorded.logprobs.shape[2:]
        ids = ids[:, :k]
        positions = np.minimum(np.arange(len(ids)), n_drafts - 1)
        here = self._passage(walk.number), n_tokens - walk.since, positions
        logprobs = self._recorded.logprobs[here][:, : ids.shape[1]]
        ranks = self._recorded.ranks[here].tolist()
        # The answer may end earlier.
        for row, rank, token in zip(ids, ranks, answer[n_tokens:], strict=False):
            row[:] = with_rank(row.tolist(), rank, token)
        n = len(draft)
        return replace(
            draft,
            tokens=ids[:n, 0].tolist(),
            logprobs=logprobs[:n, 0].tolist(),
            candidates=Candidates(ids, logprobs),
        )

    def _passage(self, number: int) -> int:
        """The recorded passage that comes in this place."""
        while len(self._drawn) <= number:
            places = (np.arange(_STRATA) + self._random.random(_STRATA)) / _STRATA
            at = np.searchsorted(self._shares, places * self._shares[-1], side="right")
            self._drawn += self._random.permutation(self._order[at]).tolist()
        return self._drawn[number]


def with_rank(row: Sequence[int], rank: int, token: int) -> list[int]:
    """Different candidates, of which `token` is the one of this rank; none if there is no such
    rank."""
    found = list(row)
    if token in found:
        at = found.index(token)
        other = next(each for each in count() if each not in found)
        found[at] = found[rank] if rank < len(found) else other
    if rank < len(found):
        found[rank] = token
    return found
