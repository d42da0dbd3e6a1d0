"""A sequence that has left its slot: its tokens, and their states in target and drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_local.prefixes.reuse import common_prefix
from dflash_local.target_model.images import n_cells

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Wanted:
    """A prompt whose beginning is looked for. `for_drafts`: only as far as the drafter has it, too.
    `unless_gave_up`: but where drafting was given up, as far as the target has it. `owner`: whose
    it is. How much of it is known would tell what others have asked, so their texts are not
    used."""

    prompt: Sequence[int]
    for_drafts: bool = False
    unless_gave_up: bool = False
    owner: str = ""

    def drafts_in(self, gave_up: bool) -> bool:
        """Whether the drafter must have tokens taken from a text in which drafting `gave_up`."""
        return self.for_drafts and not (self.unless_gave_up and gave_up)

    def n_usable(self, tokens: Sequence[int], n_drafter: int, gave_up: bool, owner: str) -> int:
        """The number of its tokens that a text can give of which the drafter has `n_drafter`: at
        most all but its last one."""
        if owner != self.owner:
            return 0
        n = min(common_prefix(tokens, self.prompt), len(self.prompt) - 1)
        return min(n, n_drafter) if self.drafts_in(gave_up) else n


@dataclass(frozen=True, eq=False)
class Prefix:
    """The tokens of a saved sequence, and the part of it that can be used.

    It can be cut, but not below `n_least` tokens: of a sliding window only the last cells are
    saved. A recurrent state can be cut only at `checkpoints`, which are lengths, the shortest
    first. The drafter has the first `n_drafter` tokens. `gave_up`: drafting was given up, so the
    drafter needs no more. `owner`: whose requests may use it.
    """

    tokens: list[int]
    n_least: int = 0
    n_drafter: int = 0
    gave_up: bool = False
    checkpoints: tuple[int, ...] = ()
    owner: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_cells(self) -> int:
        """Cells of the target's cache that it takes."""
        return n_cells(self.tokens)

    def n_usable(self, wanted: Wanted) -> int:
        """The number of a prompt's tokens that can be taken over."""
        n = wanted.n_usable(self.tokens, self.n_drafter, self.gave_up, self.owner)
        if n >= self.n_least:
            return n
        return max((length for length in self.checkpoints if length <= n), default=0)

    def serves_for(self, other: Prefix) -> bool:
        """Whether this prefix can be used for everything that `other` can."""
        n = len(other)
        return (
            self.owner == other.owner
            and all(map(self._ends_at, (other.n_least, *other.checkpoints)))
            and (self.n_least <= other.n_least or other.n_least == n)
            and self.n_drafter >= other.n_drafter
            and common_prefix(self.tokens, other.tokens) == n
        )

    def _ends_at(self, length: int) -> bool:
        """Whether it can be cut to that length."""
        return length >= self.n_least or length in self.checkpoints


@dataclass(frozen=True, eq=False, kw_only=True)
class SavedSequence(Prefix):
    """A saved sequence: `target` from `Target.save`, `drafter` from `Drafter.save` (empty without a
    drafter). `states` are those at its `checkpoints`."""

    target: Bytes
    drafter: Bytes
    states: tuple[Bytes, ...] = ()

    @property
    def n_bytes(self) -> int:
        saved = (self.target, self.drafter, *self.states)
        return 4 * len(self.tokens) + sum(part.nbytes for part in saved)
