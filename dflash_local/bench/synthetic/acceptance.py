"""Synthetic acceptance: how fast a pair would be if so many of its drafts were accepted.

Two things are replaced by those recorded from a trained pair (`RecordedDrafts`): the confidence of
the drafter, by which trees grow and widths are chosen, and which drafts the target accepts. The
text is invalid, the speed is real: every row is drafted, verified and sampled as usual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from dflash_local.bench.synthetic.passages import Passages
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.engine.accept import Verdict, accept

_WRONG = -1


@dataclass
class _Walk:
    """Where an answer is in its passage."""

    passage: int
    at: int = 0


@dataclass(frozen=True)
class _Marked(Candidates):
    """Candidates that know which of them will be accepted.

    `truth`: the token to accept at each position, `_WRONG` where it is none of the candidates.
    """

    truth: list[int]
    walk: _Walk


class SyntheticAcceptance:
    """Marks the drafts of a drafter with `mark`, and then accepts what was marked with `accept`.

    Answers walk through recorded passages: chains and trees of all widths through the same ones.
    """

    def __init__(
        self,
        recorded: RecordedDrafts,
        length: float,
        seed: int,
        *,
        usable: Callable[[int], bool] = lambda _token: True,
    ) -> None:
        """`length`: tokens of a round of whole chains. `usable(token)`: whether a token can be
        emitted again and again. Others, such as those that end the text, are never accepted, so
        that every answer has its full length. Raises InputError for an impossible length."""
        self._recorded = recorded
        self._passages = Passages(recorded, length, seed)
        self._usable = usable
        self.restart()

    def restart(self, n_tokens: int = 0) -> None:
        """Begin again where an answer of so many tokens would have ended. Whatever begins at the
        same place walks through the same passages."""
        self._passages.restart()
        self._walks: deque[_Walk] = deque()
        for _ in range(-(-n_tokens // self._recorded.n_tokens)):
            self._passages.draw()

    def mark(self, draft: Draft) -> Draft:
        """A drafter's chain with recorded confidence and acceptance. In a block that is longer than
        the recorded ones, the last position of theirs is repeated."""
        known = draft.candidates
        ids = known.ids if known else np.array(draft.tokens, np.int32)[:, None]
        walk = self._walks.popleft() if self._walks else _Walk(self._passages.draw())
        n_drafts, k = self._recorded.logprobs.shape[2:]
        at = walk.passage, walk.at, np.minimum(np.arange(len(ids)), n_drafts - 1)
        ids = ids[:, :k]
        logprobs = self._recorded.logprobs[at][:, : ids.shape[1]]
        truth = [
            row[rank] if rank < len(row) and self._usable(row[rank]) else _WRONG
            for row, rank in zip(ids.tolist(), self._recorded.ranks[at].tolist(), strict=True)
        ]
        firsts = logprobs[: len(draft), 0].tolist()
        return replace(draft, logprobs=firsts, candidates=_Marked(ids, logprobs, truth, walk))

    def accept(
        self, draft: Draft, sample: Callable[[int], int], stop: Callable[[int], bool]
    ) -> Verdict:
        """As `engine.accept.accept`: `sample(row)` once per kept row, `stop(token)` once per
        emitted token."""
        known = draft.candidates
        marked = known if isinstance(known, _Marked) else None
        n_emitted = 0

        def emit(row: int) -> int:
            nonlocal n_emitted
            drawn, at = sample(row), n_emitted
            n_emitted += 1
            if marked is None or at >= len(marked.truth):
                return self._other(drawn, [])
            token = marked.truth[at]
            return self._other(drawn, marked.ids[at].tolist()) if token == _WRONG else token

        verdict = accept(draft, emit, stop)
        if marked is not None:
            marked.walk.at += n_emitted
            if marked.walk.at < self._recorded.n_tokens:
                self._walks.append(marked.walk)
        return verdict

    def _other(self, drawn: int, drafted: list[int]) -> int:
        """A usable token of the vocabulary near `drawn` that was not drafted."""
        for token in chain(range(drawn, -1, -1), range(drawn + 1, drawn + 2 + len(drafted))):
            if token not in drafted and self._usable(token):
                return token
        return drawn
