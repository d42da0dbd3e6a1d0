"""The records of a pair on this machine, from one process to the next: costs, drafts, copies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from dflash_local import disk_cache
from dflash_local.controller.acceptance import Acceptance
from dflash_local.controller.costs import Costs
from dflash_local.copies.chances import CopyPrior
from dflash_local.draft.drafter import Drafter
from dflash_local.target_model.target import Target

_KIND = "costs"
_FORMAT = 8


def of(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    """All that is kept of a pair, for JSON; empty if there is nothing, or it cannot be read."""
    known = disk_cache.read(_KIND, _key(target, drafter))
    return known if isinstance(known, dict) else {}


def write(target: Target, drafter: Drafter | None, kept: dict[str, Any]) -> None:
    """Keep that in place of all that was kept."""
    disk_cache.write(_KIND, _key(target, drafter), kept)


def known_copies(target: Target, drafter: Drafter | None) -> CopyPrior:
    """The record of this model's copies from earlier processes; else a new one."""
    with suppress(ValueError, LookupError, TypeError):
        return CopyPrior.from_dict(of(target, drafter)["copies"])
    return CopyPrior()


def known_drafts(target: Target, drafter: Drafter, n_nodes: int) -> list[Acceptance]:
    """The records of this drafter from earlier processes, of greedy requests and of those that
    sample; else new ones. `n_nodes` are the most of a tree."""
    size = min(drafter.block_size, target.max_width)
    with suppress(ValueError, LookupError, TypeError):
        greedy, sampled = of(target, drafter)["drafts"]
        return [Acceptance.from_dict(raw, size, n_nodes) for raw in (greedy, sampled)]
    return [Acceptance(size, n_nodes), Acceptance(size, n_nodes)]


def keep(
    target: Target,
    drafter: Drafter | None,
    costs: Costs,
    drafts: Sequence[Acceptance] | None = None,
    copies: CopyPrior | None = None,
) -> None:
    """For the next process, which begins with the records of this one."""
    kept = costs.as_dict()
    if drafts is not None:
        kept["drafts"] = [known.as_dict() for known in drafts]
    if copies is not None:
        kept["copies"] = copies.as_dict()
    write(target, drafter, kept)


def _key(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    options = asdict(target.options)
    del options["n_ctx"]  # costs follow what is cached, not what could be
    del options["exact"]  # costs are measured with all threads
    return {
        "format": _FORMAT,
        "machine": target.machine(),
        "threads": target.n_threads,
        "target": target.file_key,
        "drafter": [drafter.file_key, type(drafter).__name__] if drafter else None,
        "window": drafter.draft_window if drafter else 0,
        "options": options,
    }
