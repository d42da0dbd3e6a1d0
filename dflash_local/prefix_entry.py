"""A sequence that has left its slot: its tokens, and what target and drafter know of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Prefix:
    """Which tokens a saved sequence has, int32 [n], and what it is good for.

    It can be cut to `n_least` tokens and more: of a sliding window only its last cells are saved.
    The drafter has the first `n_drafter` tokens; where drafting was given up, `resigned`, no more
    are wanted of it.
    """

    tokens: NDArray[np.int32]
    n_least: int = 0
    n_drafter: int = 0
    resigned: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def n_usable(
        self, prompt: NDArray[np.int32], *, for_drafts: bool, unless_resigned: bool = False
    ) -> int:
        """How many tokens of a prompt could be taken over; of a whole prompt, all but the last."""
        n = min(common_prefix(self.tokens, prompt), len(prompt) - 1)
        if for_drafts and not (unless_resigned and self.resigned):
            n = min(n, self.n_drafter)
        return n if n >= self.n_least else 0

    def serves_for(self, other: Prefix) -> bool:
        """Whether all that `other` is good for, this is, too."""
        n = len(other)
        return (
            self.n_least <= other.n_least
            and self.n_drafter >= other.n_drafter
            and common_prefix(self.tokens, other.tokens) == n
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry(Prefix):
    """A saved sequence: `target` as `target_state.save` gave it, `drafter` as `SavesRows.save`
    did; empty where there is none."""

    target: Bytes
    drafter: Bytes

    @property
    def n_bytes(self) -> int:
        return self.tokens.nbytes + self.target.nbytes + self.drafter.nbytes


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many tokens two arrays begin with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
