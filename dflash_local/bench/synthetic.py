"""Acceptance that is drawn, not earned: how fast a pair would be if so many tokens were accepted.

Draft j of a round survives with probability p^j, whatever the models say, as with llama.cpp's
`--spec-synth-len` (`common/speculative.cpp`). The text is invalid, its speed is not: every row is
drafted, verified and sampled as ever.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np

from dflash_local.draft import ANCHOR, Draft
from dflash_local.errors import InputError
from dflash_local.verify import Verdict

N_DRAFTS = 15
"""Drafts of a block of 16, the block size of the published drafters."""
_STRATA = 64


def mean_length(p: float, n_drafts: int) -> float:
    """Tokens of a round on average, that of the target included: the sum of p^j, j = 0..n."""
    return math.fsum(p**j for j in range(n_drafts + 1))


def rates(p: float, n_drafts: int) -> list[float]:
    """The chance of each draft, 1..n, to be accepted: what `--spec-synth-rates` takes."""
    return [p**j for j in range(1, n_drafts + 1)]


def solve_p(length: float, n_drafts: int = N_DRAFTS) -> float:
    """The p for which `n_drafts` drafts give rounds of `length` tokens on average.

    Raises InputError unless 1 <= length <= n_drafts + 1.
    """
    if not 1.0 <= length <= n_drafts + 1:  # false for NaN, too
        raise InputError(
            f"a synthetic accepted length of {length}; expected 1 to {n_drafts + 1}: "
            f"{n_drafts} drafts and one token of the target's own"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, n_drafts) < length else (low, middle)
    # the ends are exact: drafts of certain survival must not fail once in a blue moon
    return float(length > 1.0) if length in (1.0, n_drafts + 1) else (low + high) / 2


class SyntheticVerifier:
    """Stands in for `dflash_local.verify.verify`: each draft survives with probability `p` given
    that its parent did.

    A call takes one random number, whatever the draft is, from a stream of its own. So the same
    calls in the same order accept the same lengths, at any width (cut there), with any models and
    on any machine. The numbers come stratified, 64 to a batch in random order, so that the mean
    of a short run is close to that of a long one.

    `ends_text(token)` says which tokens to avoid, so that every run has its full length: such a
    draft does not survive, and in the place of such a token another one is emitted.
    """

    def __init__(
        self, p: float, seed: int, *, ends_text: Callable[[int], bool] | None = None
    ) -> None:
        if not 0.0 <= p <= 1.0:
            raise InputError(f"a chance of survival of {p}; expected 0 to 1")
        self.p = p
        self._random = np.random.default_rng(seed)
        self._batch: deque[float] = deque()
        self._ends_text = ends_text or (lambda _token: False)

    def __call__(
        self, draft: Draft, sample: Callable[[int], int], stop: Callable[[int], bool]
    ) -> Verdict:
        """As `verify`: `sample(row)` once per kept row, `stop(token)` once per emitted token."""
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(child)

        chance = self._next()
        tokens: list[int] = []
        path: list[int] = []
        node: int | None = ANCHOR
        while node is not None:
            row = node + 1
            path.append(row)
            drawn = sample(row)
            siblings = children.get(node, [])
            node, chance = self._survivor(draft, siblings, chance)
            if node is not None:
                token = draft.tokens[node]
            else:
                token = self._other(drawn, {draft.tokens[sibling] for sibling in siblings})
            tokens.append(token)
            if stop(token):
                return Verdict(tokens, path, finished=True)
        return Verdict(tokens, path, finished=False)

    def judge(self, draft: Draft) -> Draft:
        """The draft with the log-probabilities of a drafter that knows how it will be checked."""
        return replace(draft, logprobs=[math.log(max(self.p, 1e-9))] * len(draft))

    def _survivor(
        self, draft: Draft, siblings: list[int], chance: float
    ) -> tuple[int | None, float]:
        """The first sibling that survives, or None; and what is left of the random number, which is
        uniform again given the outcome, as in arithmetic coding."""
        for sibling in siblings:
            if chance < self.p and not self._ends_text(draft.tokens[sibling]):
                return sibling, chance / self.p
            if chance >= self.p:
                chance = (chance - self.p) / (1.0 - self.p)
        return None, chance

    def _other(self, drawn: int, drafted: set[int]) -> int:
        """A token of the vocabulary near `drawn` that was not drafted and does not end the text."""
        for token in chain(range(drawn, -1, -1), range(drawn + 1, drawn + 2 + len(drafted))):
            if token not in drafted and not self._ends_text(token):
                return token
        return drawn

    def _next(self) -> float:
        if not self._batch:
            offsets = self._random.random(_STRATA)
            self._batch.extend((self._random.permutation(_STRATA) + offsets) / _STRATA)
        return self._batch.popleft()
