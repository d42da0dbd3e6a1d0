"""Offers copies from a sequence's own text, prompt and answer: continuations of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from dflash_local.copies.chances import CopyPrior
from dflash_local.llama import native

_MOST = 4
"""Copies offered at once: the edits of a copy that was left, and the best matches. More would be
looked at in vain."""


@dataclass(frozen=True)
class Copy:
    """Tokens that may follow the anchor. `kinds`: of each, the evidence for it (see `chances`).
    `chances`: of each, that it is right where all before it are."""

    tokens: list[int]
    kinds: list[int]
    chances: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    def clip(self, n: int) -> Copy:
        if n >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:n], kinds=self.kinds[:n], chances=self.chances[:n])

    @cached_property
    def curve(self) -> list[float]:
        """The chance of each token that it and all before it are right."""
        return list(accumulate(self.chances, mul))


class Copier:
    """Copies for one sequence. Each call takes in the text written since the one before."""

    def __init__(
        self,
        prior: CopyPrior,
        further: Sequence[int] = (),
        earlier: Sequence[native.CopyIndex] = (),
    ) -> None:
        """`further` is text to copy from besides the sequence's own, as if it stood before it.
        `earlier` are texts that are taken up once the sequence repeats one of them."""
        self._offers = native.CopyOffers(prior)
        self.chances = self._offers.chances
        self._further = further
        self._earlier = list(earlier)
        self._index = native.CopyIndex()
        self._n_before = 0  # tokens before the answer, once they are indexed

    def finds(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        n: int,
        least: NDArray[np.float64] | None = None,
    ) -> bool:
        """Look for copies of at most `n` tokens that may follow, and say whether `offers` is worth
        a look: whether of some first k + 1 tokens of one copy at least `least[k]` are expected to
        be right; without `least`, whether there are any.

        `prompt` is that of all calls, and `tokens`, the answer so far, only grows.
        """
        index = self._index
        if not self._n_before:
            index.extend(self._further)
            index.extend(prompt)
            self._n_before = len(index)
        self._offers.learn(index, tokens[len(index) - self._n_before :])
        if self._earlier and n > 0:
            self._take_up()
        return self._offers.find(self._index, _MOST, n, least)

    def offers(self) -> list[Copy]:
        """The copies that were found last; none is empty."""
        return [Copy(*offer) for offer in self._offers.last]

    def take_kinds(self, copies: Sequence[Copy]) -> None:
        """The last offers, with the drafter's opinion of them."""
        self._offers.take_kinds([(copy.tokens, copy.kinds) for copy in copies])

    def ended(self, prompt: Sequence[int], tokens: Sequence[int]) -> native.CopyIndex | None:
        """The index of the whole text, without what was taken up; None if there is none."""
        if not self._n_before:
            return None
        index = self._index
        if self._further or self._n_before > len(prompt):
            index = native.CopyIndex()
            index.extend(prompt)
            index.extend(tokens)
        else:
            index.extend(tokens[len(index) - self._n_before :])
        return index

    def _take_up(self) -> None:
        """Put an earlier text before this one, if it has the end of this one, and this one has that
        only once. Until then it costs no more than to ask."""
        own = self._index
        if own.goes_on(own):
            return
        for i, text in enumerate(self._earlier):
            if text.goes_on(own):
                self._index = native.CopyIndex()
                self._index.extend_by(text)
                self._index.extend_by(own)
                self._n_before += len(text)
                del self._earlier[i]
                return
