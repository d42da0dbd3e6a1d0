"""The memory that a loaded pair takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.draft.fused_drafter import FusedDrafter

if TYPE_CHECKING:
    from dflash_local.model import Model


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. `drafter_cache` is the present size of that cache, `drafter_cache_limit` its size at
    the end of the context; `compute` are the target's buffers as planned."""

    target: int
    target_cache: int
    compute: int
    drafter: int
    drafter_cache: int
    drafter_cache_limit: int

    @classmethod
    def of(cls, model: Model) -> MemoryUse:
        """At this moment."""
        plan, drafter = model.plan, model.drafter
        assert plan is not None, "a loaded model has one"
        # A drafter of another kind tells nothing, so it counts as grown.
        grown = plan.drafter_kv_bytes
        if isinstance(drafter, FusedDrafter):
            grown = drafter.n_cache_bytes
        return cls(
            target=plan.target_bytes,
            target_cache=plan.kv_bytes,
            compute=sum(use.compute for use in plan.devices),
            drafter=plan.drafter_bytes,
            drafter_cache=grown,
            drafter_cache_limit=plan.drafter_kv_bytes,
        )
