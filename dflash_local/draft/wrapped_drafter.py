"""A drafter around another one, which does the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.target.taps import Features


def _unchanged(_request: DraftRequest, draft: Draft) -> Draft:
    return draft


class WrappedDrafter(Drafter):
    """Passes everything on to `inner`, but for saved rows. Its drafts pass through `change`."""

    def __init__(
        self, inner: Drafter, change: Callable[[DraftRequest, Draft], Draft] = _unchanged
    ) -> None:
        self.inner = inner
        self.change = change
        self.top_k = inner.top_k
        self.gives_candidates = inner.gives_candidates
        self.draft_window = inner.draft_window
        self.file_key = inner.file_key

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    @property
    def n_builds(self) -> int:  # type: ignore[override]
        return self.inner.n_builds

    def length(self, seq: int) -> int:
        return self.inner.length(seq)

    def inject(self, seq: int, features: Features) -> None:
        self.inner.inject(seq, features)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        super().begin(requests)
        self.inner.begin(requests)

    def read(self) -> list[Draft]:
        drafts = self.inner.read()
        return [self.change(*pair) for pair in zip(self._begun, drafts, strict=True)]

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.begin(requests)
        return self.read()

    def truncate(self, seq: int, length: int) -> None:
        self.inner.truncate(seq, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self.inner.copy(source, target, length)

    def close(self) -> None:
        self.inner.close()
