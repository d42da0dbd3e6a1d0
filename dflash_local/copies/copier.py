"""Offers what a sequence's own text, prompt and answer, has already: continuations of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul

from dflash_local.copies.chances import CopyChances, CopyPrior
from dflash_local.llama import native

_MOST = 4
"""Copies offered at once: the edits of a copy that was left, and the best matches. More would be
looked at in vain."""


@dataclass(frozen=True)
class Copy:
    """Tokens that may follow the anchor. `kinds`: of each, what speaks for it (see `chances`).
    `chances`: of each, that it is right where all before it are."""

    tokens: list[int]
    kinds: list[int]
    chances: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    def clip(self, n: int) -> Copy:
        """The first `n` tokens."""
        if n >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:n], kinds=self.kinds[:n], chances=self.chances[:n])

    @cached_property
    def curve(self) -> list[float]:
        """The chance of each token that it and all before it are right."""
        return list(accumulate(self.chances, mul))


class Copier:
    """Copies for one sequence. Each call takes in what has been written since the one before."""

    def __init__(
        self,
        prior: CopyPrior,
        further: Sequence[int] = (),
        earlier: Sequence[native.CopyIndex] = (),
    ) -> None:
        """`further` is text to copy from besides the sequence's own, as if it stood before it.
        `earlier` are texts that are taken up once the sequence repeats one of them."""
        self.chances = CopyChances(prior)
        self._further = further
        self._earlier = list(earlier)
        self._index = native.CopyIndex()
        self._n_before = 0  # tokens before the answer, once they are indexed
        self._offered: list[Copy] = []

    def offer(self, prompt: Sequence[int], tokens: Sequence[int], n: int) -> list[Copy]:
        """Copies of at most `n` tokens that may follow; none is empty.

        `prompt` is that of all calls, and `tokens`, the answer so far, only grows.
        """
        index = self._index
        if not self._n_before:
            index.extend(self._further)
            index.extend(prompt)
            self._n_before = len(index)
        new = tokens[len(index) - self._n_before :]
        self._learn(new)
        index.extend(new)
        if n < 1:
            return []
        if self._earlier:
            self._take_up()
        found = self._index.find(_MOST, n)
        each = self.chances.each
        self._offered = [Copy(tokens, kinds, each(kinds)) for tokens, kinds in found]
        return self._offered

    def heard(self, copies: Sequence[Copy]) -> None:
        """The last offer, with what the drafter thinks of it."""
        self._offered = list(copies)

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
        """Put an earlier text before this one, if it has what this one ends with, and this one has
        that only once. Until then it costs no more than to ask."""
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

    def _learn(self, new: Sequence[int]) -> None:
        """What became of the last offer: `new` was written instead, or just that."""
        offered, self._offered = self._offered, []
        learn = self.chances.learn
        if not offered:
            self.chances.learn_silence(len(new))
        for copy in offered:
            for token, kind, written in zip(copy.tokens, copy.kinds, new, strict=False):
                learn(kind, token == written)
                if token != written:
                    break
