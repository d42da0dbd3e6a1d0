"""Acceptance that is drawn, not earned: how fast a pair would be if so many tokens were accepted.

What the drafter says of its candidates, and which of them the target writes, is replaced by what
was recorded of a trained pair (`RecordedDrafts`): the log-probabilities, by which trees grow and
widths are chosen, and the outcome. The text is invalid, its speed is not: every row is drafted,
verified and sampled as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.engine.verify import Verdict, verify
from dflash_local.target.taps import Features

_STRATA = 16
_WRONG = -1


@dataclass
class _Walk:
    """Where an answer is in its passage."""

    passage: int
    at: int = 0


@dataclass(frozen=True)
class _Judged(Candidates):
    """`truth`: the token that comes true at each position, `_WRONG` for none of them."""

    truth: list[int]
    walk: _Walk


class Synthetic:
    """Stands in for what a drafter says and for what `verify` finds.

    Drafts walk through the passages recorded, as far as they are accepted: chains and trees of all
    widths through the same ones. The passages come stratified by the length of their rounds, in
    random order, so that the mean of a short run is close to that of a long one.

    `usable(token)` says which tokens can be written on and on: others, such as those that end the
    text, never come true, so that every run has its full length.
    """

    def __init__(
        self,
        recorded: RecordedDrafts,
        length: float,
        seed: int,
        *,
        usable: Callable[[int], bool] = lambda _token: True,
    ) -> None:
        """`length` are the tokens of a round of whole chains. Raises InputError for one that there
        cannot be."""
        self._recorded = recorded
        self._order = np.argsort(recorded.kept.mean(axis=1), kind="stable")
        self._shares = np.cumsum(recorded.weights(length)[self._order])
        self._seed = seed
        self._usable = usable
        self.restart()

    def restart(self, n_tokens: int = 0) -> None:
        """Begin again where an answer of so many tokens would have ended: with the same passages
        for all that begin there."""
        self._random = np.random.default_rng(self._seed)
        self._passages: deque[int] = deque()
        self._walks: deque[_Walk] = deque()
        for _ in range(-(-n_tokens // self._recorded.n_tokens)):
            self._next_passage()

    def judge(self, draft: Draft) -> Draft:
        """A drafter's chain with the confidence, and the fate, of those recorded. A block that is
        longer than theirs goes on like their last position."""
        known = draft.candidates
        ids = known.ids if known else np.array(draft.tokens, np.int32)[:, None]
        walk = self._walks.popleft() if self._walks else _Walk(self._next_passage())
        n_drafts, k = self._recorded.logprobs.shape[2:]
        at = walk.passage, walk.at, np.minimum(np.arange(len(ids)), n_drafts - 1)
        ids = ids[:, :k]
        logprobs = self._recorded.logprobs[at][:, : ids.shape[1]]
        truth = [
            self._true(row[rank]) if rank < len(row) else _WRONG
            for row, rank in zip(ids.tolist(), self._recorded.ranks[at].tolist(), strict=True)
        ]
        firsts = logprobs[: len(draft), 0].tolist()
        judged = _Judged(ids, logprobs, truth, walk)
        return replace(draft, logprobs=firsts, candidates=judged)

    def verify(
        self, draft: Draft, sample: Callable[[int], int], stop: Callable[[int], bool]
    ) -> Verdict:
        """As `dflash_local.engine.verify.verify`: `sample(row)` once per kept row, `stop(token)` once per
        emitted token."""
        known = draft.candidates
        judged = known if isinstance(known, _Judged) else None
        n_written = 0

        def write(row: int) -> int:
            nonlocal n_written
            drawn, at = sample(row), n_written
            n_written += 1
            if judged is None or at >= len(judged.truth):
                return self._other(drawn, [])
            token = judged.truth[at]
            return self._other(drawn, judged.ids[at].tolist()) if token == _WRONG else token

        verdict = verify(draft, write, stop)
        if judged is not None:
            walk = judged.walk
            walk.at += n_written
            if walk.at < self._recorded.n_tokens:
                self._walks.append(walk)
        return verdict

    def _true(self, token: int) -> int:
        return token if self._usable(token) else _WRONG

    def _other(self, drawn: int, drafted: list[int]) -> int:
        """A usable token of the vocabulary near `drawn` that was not drafted."""
        for token in chain(range(drawn, -1, -1), range(drawn + 1, drawn + 2 + len(drafted))):
            if token not in drafted and self._usable(token):
                return token
        return drawn

    def _next_passage(self) -> int:
        if not self._passages:
            places = (np.arange(_STRATA) + self._random.random(_STRATA)) / _STRATA
            at = np.searchsorted(self._shares, places * self._shares[-1], side="right")
            self._passages.extend(self._random.permutation(self._order[at]).tolist())
        return self._passages.popleft()


class SyntheticDrafter(Drafter):
    """A drafter whose proposals go through `Synthetic.judge`; it does all the work as ever."""

    def __init__(self, drafter: Drafter, synthetic: Synthetic) -> None:
        self._drafter = drafter
        self._judge = synthetic.judge
        self.top_k = drafter.top_k
        self.gives_candidates = drafter.gives_candidates
        self.draft_window = drafter.draft_window
        self.file_key = drafter.file_key

    @property
    def block_size(self) -> int:
        return self._drafter.block_size

    @property
    def n_builds(self) -> int:  # type: ignore[override]
        return self._drafter.n_builds

    def length(self, seq: int) -> int:
        return self._drafter.length(seq)

    def inject(self, seq: int, features: Features) -> None:
        self._drafter.inject(seq, features)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._drafter.begin(requests)

    def read(self) -> list[Draft]:
        return [self._judge(draft) for draft in self._drafter.read()]

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.begin(requests)
        return self.read()

    def truncate(self, seq: int, length: int) -> None:
        self._drafter.truncate(seq, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self._drafter.copy(source, target, length)

    def close(self) -> None:
        self._drafter.close()


def synthetic_engine(engine: Engine, synthetic: Synthetic) -> Engine:
    """An engine over the same models, in which acceptance is drawn."""
    assert engine.drafter is not None
    drawn = Engine(
        engine.target,
        SyntheticDrafter(engine.drafter, synthetic),
        len(engine.slots),
        engine.controller,
        verify=synthetic.verify,
    )
    drawn.usual_shape = engine.usual_shape
    return drawn
