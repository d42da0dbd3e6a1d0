"""A draft: the tokens that a drafter proposes for one verify pass, as a chain or a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ANCHOR = -1
"""Parent of the nodes that follow the anchor directly."""


@dataclass(frozen=True)
class Candidates:
    """The k likeliest tokens of each of the n drafted positions, best first.

    `ids` int32 [n, k]; `logprobs` float32 [n, k], natural logarithms, descending in each row. Ids
    are as the drafter gave them and may be outside the target's vocabulary. `steps`, float32
    [n, k, k], is given if positions depend on one another: the logarithm for each candidate after
    each candidate of the position before. `logprobs` are then those after the first one of it.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    steps: NDArray[np.float32] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.shape != self.logprobs.shape:
            raise ValueError(
                f"candidates: ids {self.ids.shape} and logprobs {self.logprobs.shape} "
                "must both be [positions, k]"
            )
        if self.steps is not None and self.steps.shape != (*self.ids.shape, self.ids.shape[1]):
            raise ValueError(
                f"candidates: steps {self.steps.shape} must be [positions, k, k] for ids "
                f"{self.ids.shape}"
            )


@dataclass(frozen=True)
class Draft:
    """Drafted nodes. `parents[i]` is the index of node i's parent: `ANCHOR`, or less than i.

    In a chain `parents[i]` is i - 1. `logprobs` are the drafter's own, one natural logarithm for
    each node. `copied` marks the nodes that no drafter proposed, but the text has already. Raises
    ValueError for lists of unequal lengths and for a parent that does not precede its child.
    """

    tokens: list[int]
    parents: list[int]
    logprobs: list[float] = field(default_factory=list)
    candidates: Candidates | None = None
    copied: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.logprobs:
            object.__setattr__(self, "logprobs", [0.0] * len(self.tokens))
        if not self.copied:
            object.__setattr__(self, "copied", [False] * len(self.tokens))
        if not len(self.tokens) == len(self.parents) == len(self.logprobs) == len(self.copied):
            raise ValueError(
                f"a draft of {len(self.tokens)} tokens has {len(self.parents)} parents "
                f"and {len(self.logprobs)} log-probabilities; the counts must be equal"
            )
        if self.is_chain:
            return
        for node, parent in enumerate(self.parents):
            if not ANCHOR <= parent < node:
                raise ValueError(f"node {node} of a draft has parent {parent}, not one before it")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each node follows the one before. Each round asks several times."""
        return self.parents == list(range(ANCHOR, len(self.parents) - 1))

    @property
    def is_copy(self) -> bool:
        """Whether it is a chain of copied tokens alone."""
        return all(self.copied) and self.is_chain

    @property
    def depths(self) -> list[int]:
        """The depth of each node, in tokens after the anchor: 1 for those directly after it."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return depths

    @property
    def chances(self) -> list[float]:
        """Of each node, the product of the probabilities along its path."""
        sums: list[float] = []
        for parent, own in zip(self.parents, self.logprobs, strict=True):
            sums.append(own + (sums[parent] if parent >= 0 else 0.0))
        return list(map(math.exp, sums))

    @property
    def leaves(self) -> list[int]:
        """The nodes that nothing follows."""
        inner = set(self.parents)
        return [node for node in range(len(self)) if node not in inner]

    def leaves_first(self, path: Sequence[int]) -> bool:
        """Whether a path, given as nodes from the anchor's child on, leaves the chain of first
        children, which are the drafter's best tokens."""
        firsts = {parent: node for node, parent in reversed(list(enumerate(self.parents)))}
        return any(firsts[self.parents[node]] != node for node in path)

    def path(self, node: int) -> list[int]:
        """The nodes from the anchor's child to `node`."""
        path = []
        while node != ANCHOR:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        candidates: Candidates | None = None,
    ) -> Draft:
        """A chain of these tokens. Without log-probabilities, all count as certain."""
        parents = list(range(ANCHOR, len(tokens) - 1))
        return cls(list(tokens), parents, list(logprobs or ()), candidates)

    def clip(self, n: int) -> Draft:
        """The first `n` nodes. They are a draft, too, as parents precede their children."""
        n = max(n, 0)
        if n >= len(self):
            return self
        return replace(
            self,
            tokens=self.tokens[:n],
            parents=self.parents[:n],
            logprobs=self.logprobs[:n],
            copied=self.copied[:n],
        )

    def valid_prefix(self, n_vocab: int) -> Draft:
        """The draft without nodes whose token is outside 0..n_vocab-1 and all below these."""
        if not self.tokens or (min(self.tokens) >= 0 and max(self.tokens) < n_vocab):
            return self
        return self.subtree([0 <= token < n_vocab for token in self.tokens])

    def subtree(self, keep: Sequence[bool]) -> Draft:
        """The draft without the nodes that `keep` excludes, and without all below these."""
        kept: list[int] = []
        index = {ANCHOR: ANCHOR}
        for node, parent in enumerate(self.parents):
            if keep[node] and parent in index:
                index[node] = len(kept)
                kept.append(node)
        return replace(
            self,
            tokens=[self.tokens[node] for node in kept],
            parents=[index[self.parents[node]] for node in kept],
            logprobs=[self.logprobs[node] for node in kept],
            copied=[self.copied[node] for node in kept],
        )
