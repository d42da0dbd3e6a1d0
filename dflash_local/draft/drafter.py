"""The drafter protocol: a drafter proposes the tokens that the target then checks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Draft
from dflash_local.target_model.taps import Features


@dataclass(frozen=True)
class DraftRequest:
    """One block of one sequence.

    `features`, [n, n_features], are the context features of the rows accepted since the last draft;
    n may be 0. `anchor` is the token after them. `n_draft` is the number of tokens to propose.
    `text` is all tokens of the sequence before the anchor; do not change it. `whole`: propose all
    of them, also where that seems in vain: it is measured how long it takes.
    """

    seq: int
    anchor: int
    features: Features
    n_draft: int
    text: Sequence[int] = ()
    whole: bool = False


class Drafter(ABC):
    """The engine's interface to a drafter. Sequences are 0 .. n_seq-1; positions start at 0.

    The i-th injected row of a sequence belongs to position i. Not thread safe. A drafter of your
    own implements the abstract methods; the others have defaults.
    """

    name: str = "the drafter"
    """What it is called in what is said of a request."""
    top_k: int = 1
    """Candidates per position in `Draft.candidates`; trees need more than one."""
    gives_candidates: bool = False
    """Whether this kind of drafter can give more than one candidate per position."""
    by_steps: bool = False
    """Whether a draft is made token by token, so that a shorter one takes less time."""
    draft_window: int = 0
    """The number of a sequence's last rows that drafts look at; 0: all rows."""
    saves_rows: bool = False
    """Whether `save`, `restore` and `n_visible` work. If not, saved texts are decoded again."""
    n_builds: int = 0
    """Graphs built so far. A draft that builds one takes longer than usual."""
    file_key: Sequence[Any] = ()
    """Identifies this drafter in caches on disk; see `gguf.file.file_key`."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens of a block, anchor included: at most `block_size - 1` are proposed at once. At
        most `fit.options.MAX_OUTPUT_ROWS`: a pass of the target verifies no more."""

    @abstractmethod
    def length(self, seq: int) -> int:
        """The number of injected rows of a sequence."""

    @abstractmethod
    def inject(self, seq: int, features: Features) -> None:
        """Inject the context features, [n, n_features], of the next n positions.

        Raises ContextFullError, with nothing injected, if they do not fit.
        """

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Inject the features of each request, then propose its tokens: one draft per request."""

    @abstractmethod
    def truncate(self, seq: int, length: int) -> None:
        """Forget the rows of positions `length` and up, if there are any."""

    @abstractmethod
    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` rows of sequence `source` those of sequence `target`."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call again."""

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start drafts, which `read` returns. The host can work while a device drafts."""
        self._begun = list(requests)

    def read(self) -> list[Draft]:
        """Wait for the drafts of the last `begin`."""
        return self.draft(self._begun)

    def save(self, seq: int) -> NDArray[np.uint8]:
        """The rows of a sequence as bytes for `restore`, uint8 [n] in host memory."""
        raise NotImplementedError(f"{type(self).__name__} does not save rows")

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        """Replace the rows of a sequence by saved ones.

        Raises InputError or ContextFullError if they do not fit. The sequence is then empty or
        unchanged.
        """
        raise NotImplementedError(f"{type(self).__name__} does not restore rows")

    def n_visible(self, seq: int, length: int) -> int:
        """The number of the first `length` rows that a draft after them would look at.

        With a window these become fewer once it has moved on.
        """
        return length


def _inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


class WrappedDrafter(Drafter):
    """Another drafter, whose drafts pass through `change`. All else is passed on to it."""

    block_size, n_builds, length, n_visible = map(
        _inner, ("block_size", "n_builds", "length", "n_visible")
    )
    inject, truncate, copy, save, restore, close = map(
        _inner, ("inject", "truncate", "copy", "save", "restore", "close")
    )

    def __init__(
        self,
        inner: Drafter,
        change: Callable[[DraftRequest, Draft], Draft] = lambda _, draft: draft,
    ) -> None:
        self.inner = inner
        self.change = change
        self.name, self.file_key = inner.name, inner.file_key
        self.top_k, self.gives_candidates = inner.top_k, inner.gives_candidates
        self.by_steps, self.draft_window = inner.by_steps, inner.draft_window
        self.saves_rows = inner.saves_rows

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.begin(requests)
        return self.read()

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        super().begin(requests)
        self.inner.begin(requests)

    def read(self) -> list[Draft]:
        return [self.change(*pair) for pair in zip(self._begun, self.inner.read(), strict=True)]
