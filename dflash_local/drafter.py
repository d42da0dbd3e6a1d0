"""Drafters: what proposes the tokens that the target then checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dflash_local import seam
from dflash_local.draft import Candidates, Draft
from dflash_local.errors import ClosedError, InputError
from dflash_local.features import Features, StoredFeatures
from dflash_local.target import Target

TOP_K = 1
"""Candidates per drafted position: all that a chain needs."""
TREE_TOP_K = 8
"""All that a tree of some dozens of nodes can use."""


@dataclass(frozen=True)
class DraftRequest:
    """One block of one sequence.

    `features`, [n, n_features], are the context features of the rows accepted since the last draft,
    possibly none; `anchor` is the token after them; `n_draft` is how many tokens to propose.
    """

    seq: int
    anchor: int
    features: Features
    n_draft: int


@runtime_checkable
class Drafter(Protocol):
    """What the engine asks of a drafter. Sequences are 0 .. n_seq-1; positions start at 0.

    The i-th injected row of a sequence belongs to position i. Not thread safe.
    """

    @property
    def block_size(self) -> int:
        """Anchor and drafts: at most `block_size - 1` tokens are proposed at once."""

    def length(self, seq: int) -> int:
        """Rows injected."""

    def inject(self, seq: int, features: Features) -> None:
        """Context features, [n, n_features], of the next n positions.

        Raises ContextFullError, with nothing injected, when they do not fit.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Inject the features of each request, then propose its tokens; a draft per request."""

    def truncate(self, seq: int, length: int) -> None:
        """Forget the rows of positions `length` and up; nothing when there are none."""

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` rows of `source` become those of `target`."""

    def close(self) -> None:
        """Free everything. Safe to call again."""


@runtime_checkable
class SavesRows(Drafter, Protocol):
    """A drafter whose rows can leave it and come back. Others learn a text anew."""

    def save(self, seq: int) -> NDArray[np.uint8]:
        """The rows of a sequence, for `restore`, in host memory: uint8 [n]."""

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        """Saved rows in place of those of a sequence.

        Raises InputError or ContextFullError for what does not fit; the sequence is then empty or
        as it was.
        """

    def n_visible(self, seq: int, length: int) -> int:
        """How many of the first `length` rows a draft after them would look at: fewer than it
        would have seen at the time, where a window has moved on since."""


class FusedDrafter:
    """A DFlash drafter file in one static ggml graph, on the device of the target's output head.

    Shares the target's embeddings and head; each row that attention may see is kept in f16.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Target,
        *,
        n_seq: int,
        n_ctx: int,
        draft_window: int = 0,
        top_k: int = TOP_K,
        n_threads: int | None = None,
    ) -> None:
        """`draft_window`: of a sequence's rows, how many drafts look at: the last ones; 0: all. No
        others are kept, but some to roll back to. Raises FileError for a file that the graph cannot
        run, InputError for numbers out of range, BackendError without room.
        """
        self.path = Path(path)
        self.draft_window = draft_window
        self.top_k = top_k
        self._target = target  # keeps the shared tensors alive
        self._native: seam.FusedDrafter | None = seam.FusedDrafter(
            target.address,
            target.native,
            os.fspath(path),
            n_seq,
            n_ctx,
            top_k,
            n_threads or target.n_threads,
            draft_window,
            target.threads,
        )
        target.attach(self)

    @property
    def _open(self) -> seam.FusedDrafter:
        if self._native is None:
            raise ClosedError("this drafter is closed; load it again")
        return self._native

    @property
    def block_size(self) -> int:
        return self._open.block_size

    @property
    def n_features(self) -> int:
        """Width of a context feature: taps times hidden size."""
        return self._open.n_features

    @property
    def device(self) -> str:
        return self._open.device

    @property
    def n_builds(self) -> int:
        """Draft graphs made so far: each for a length of context and a number of rows."""
        return self._open.n_builds

    @property
    def n_weight_bytes(self) -> int:
        return self._open.n_weight_bytes

    @property
    def n_cache_bytes(self) -> int:
        """Of the cache as it is now; it grows with the context in use, as far as the window."""
        return self._open.n_cache_bytes

    def length(self, seq: int) -> int:
        return self._open.length(seq)

    def inject(self, seq: int, features: Features) -> None:
        if self._is_stored(features):
            self._open.inject_stored(seq, features.rows)
        else:
            self._open.inject(seq, self._rows(features))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        if not requests:
            return []
        n_draft = max(request.n_draft for request in requests)
        seqs = [request.seq for request in requests]
        anchors = [request.anchor for request in requests]
        features = [request.features for request in requests]
        if all(self._is_stored(rows) for rows in features):
            ids, logprobs = self._open.draft_stored(
                seqs,
                [rows.rows for rows in features if self._is_stored(rows)],
                anchors,
                n_draft,
                self._target.tidy,
            )
        else:
            ids, logprobs = self._open.draft(
                seqs, [self._rows(rows) for rows in features], anchors, n_draft
            )
        return [
            Draft.chain(
                ids[i, : request.n_draft, 0].tolist(),
                logprobs[i, : request.n_draft, 0].tolist(),
                Candidates(ids[i, : request.n_draft], logprobs[i, : request.n_draft]),
            )
            for i, request in enumerate(requests)
        ]

    def truncate(self, seq: int, length: int) -> None:
        self._open.truncate(seq, min(length, self._open.length(seq)))

    def copy(self, source: int, target: int, length: int) -> None:
        self._open.copy(source, target, length)

    def save(self, seq: int) -> NDArray[np.uint8]:
        return self._open.save(seq)

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        self._open.restore(seq, saved)

    def n_visible(self, seq: int, length: int) -> int:
        return self._open.n_visible(seq, length)

    def close(self) -> None:
        self._native = None

    def _is_stored(self, features: Features) -> TypeGuard[StoredFeatures]:
        return isinstance(features, StoredFeatures) and features.target is self._target

    def _rows(self, features: Features) -> NDArray[np.float32]:
        if features.ndim != 2 or features.shape[1] != self.n_features:
            raise InputError(
                f"context features of shape {features.shape}; expected [n, {self.n_features}]"
            )
        return np.ascontiguousarray(features, np.float32)
