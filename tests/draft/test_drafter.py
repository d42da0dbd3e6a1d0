"""Promises of the protocol of drafters to those that wrap one."""

import numpy as np

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest, WrappedDrafter
from pair_engine import fused_drafter, open_target


def test_a_wrapped_drafter_does_all_that_the_drafter_does() -> None:
    protocol = {name for name in vars(Drafter) if not name.startswith("_")}
    with open_target(n_seq=2) as target:
        drafter = fused_drafter(target)
        wrapped = WrappedDrafter(drafter, lambda _, draft: draft.clip(2))
        assert protocol <= {*vars(WrappedDrafter), *vars(wrapped)}
        for name in ("top_k", "gives_candidates", "draft_window", "saves_rows", "file_key"):
            assert getattr(wrapped, name) == getattr(drafter, name)
        rows = np.random.default_rng(0).normal(size=(7, drafter.n_features)).astype(np.float32)
        wrapped.inject(0, rows)
        wrapped.copy(0, 1, 5)
        wrapped.truncate(0, 3)
        assert [drafter.length(0), drafter.length(1)] == [wrapped.length(0), wrapped.length(1)]
        assert [drafter.length(0), drafter.length(1)] == [3, 5]
        saved = wrapped.save(1)
        assert (saved == drafter.save(1)).all()
        wrapped.restore(0, saved)
        assert drafter.length(0) == 5
        assert wrapped.n_visible(0, 5) == drafter.n_visible(0, 5)

        def drafts(of: Drafter) -> Draft:
            (draft,) = of.draft([DraftRequest(1, 9, rows[:0], 6)])
            return draft

        n_builds = wrapped.n_builds
        assert drafts(wrapped).tokens == drafts(drafter).tokens[:2]
        assert wrapped.n_builds == drafter.n_builds > n_builds
        wrapped.begin([])
        assert wrapped.read() == []
        assert wrapped.block_size == drafter.block_size
