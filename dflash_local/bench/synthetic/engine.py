"""An engine in which acceptance is synthetic. It does all the work of a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_local.bench.synthetic.acceptance import SyntheticAcceptance
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.target.taps import Features


class SyntheticDrafter(Drafter):
    """Another drafter, whose drafts are marked with what will be accepted of them."""

    def __init__(self, drafter: Drafter, mark: Callable[[DraftRequest, Draft], Draft]) -> None:
        """`mark` returns a draft with what was recorded, given the request for it."""
        self._drafter = drafter
        self._mark = mark
        self._requests: Sequence[DraftRequest] = ()
        self.top_k = drafter.top_k
        self.gives_candidates = drafter.gives_candidates
        self.draft_window = drafter.draft_window
        self.file_key = drafter.file_key

    @property
    def block_size(self) -> int:
        return self._drafter.block_size

    @property
    def n_builds(self) -> int:  # type: ignore[override]
        return self._drafter.n_builds

    def length(self, seq: int) -> int:
        return self._drafter.length(seq)

    def inject(self, seq: int, features: Features) -> None:
        self._drafter.inject(seq, features)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._requests = requests
        self._drafter.begin(requests)

    def read(self) -> list[Draft]:
        drafts = self._drafter.read()
        return [self._mark(*pair) for pair in zip(self._requests, drafts, strict=True)]

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.begin(requests)
        return self.read()

    def truncate(self, seq: int, length: int) -> None:
        self._drafter.truncate(seq, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self._drafter.copy(source, target, length)

    def close(self) -> None:
        self._drafter.close()


def synthetic_engine(engine: Engine, acceptance: SyntheticAcceptance) -> Engine:
    """An engine over the same models; `engine` must not be used any more."""
    assert engine.drafter is not None
    made = Engine(
        engine.target,
        SyntheticDrafter(engine.drafter, lambda _request, draft: acceptance.mark(draft)),
        len(engine.slots),
        engine.controller,
        accept=acceptance.accept,
        learns=False,
    )
    made.usual_shape = engine.usual_shape
    return made
