"""The drafter protocol: what proposes the tokens that the target then checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Draft
from dflash_local.target.taps import Features


@dataclass(frozen=True)
class DraftRequest:
    """One block of one sequence.

    `features`, [n, n_features], are the context features of the rows accepted since the last draft,
    possibly none; `anchor` is the token after them; `n_draft` is how many tokens to propose. `text`
    are all tokens of the sequence before the anchor, to be read only.
    """

    seq: int
    anchor: int
    features: Features
    n_draft: int
    text: Sequence[int] = ()


class Drafter(ABC):
    """What the engine asks of a drafter. Sequences are 0 .. n_seq-1; positions start at 0.

    The i-th injected row of a sequence belongs to position i. Not thread safe. A drafter of your
    own implements the abstract methods; the others have defaults for one that does without.
    """

    top_k: int = 1
    """Candidates per position in `Draft.candidates`; trees need more than one."""
    gives_candidates: bool = False
    """Whether it can be opened with a `top_k` above 1."""
    draft_window: int = 0
    """How many rows of a sequence drafts look at, the last ones; 0: all."""
    saves_rows: bool = False
    """Whether `save`, `restore` and `n_visible` work. Others read a text again."""
    n_builds: int = 0
    """Graphs built so far. A draft that builds one takes longer than usual."""
    file_key: Sequence[Any] = ()
    """What tells this drafter from others in caches on disk; see `gguf.file.file_key`."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Anchor and drafts: at most `block_size - 1` tokens are proposed at once."""

    @abstractmethod
    def length(self, seq: int) -> int:
        """Rows injected."""

    @abstractmethod
    def inject(self, seq: int, features: Features) -> None:
        """Context features, [n, n_features], of the next n positions.

        Raises ContextFullError, with nothing injected, when they do not fit.
        """

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Inject the features of each request, then propose its tokens; a draft per request."""

    @abstractmethod
    def truncate(self, seq: int, length: int) -> None:
        """Forget the rows of positions `length` and up; nothing when there are none."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` rows of `source` become those of `target`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call again."""

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start what `read` returns: the caller has work for the host while a device drafts."""
        self._begun = list(requests)

    def read(self) -> list[Draft]:
        """Wait for the drafts of the last `begin`."""
        return self.draft(self._begun)

    def save(self, seq: int) -> NDArray[np.uint8]:
        """The rows of a sequence, for `restore`, in host memory: uint8 [n]."""
        raise NotImplementedError(f"{type(self).__name__} does not save rows")

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        """Put saved rows in place of those of a sequence.

        Raises InputError or ContextFullError for what does not fit; the sequence is then empty or
        as it was.
        """
        raise NotImplementedError(f"{type(self).__name__} does not restore rows")

    def n_visible(self, seq: int, length: int) -> int:
        """How many of the first `length` rows a draft after them would look at.

        They are fewer than they were at that time if the window has moved on since.
        """
        return length
