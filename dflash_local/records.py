"""The records of a pair on this machine, from one process to the next: costs, drafts, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from dflash_local import disk_cache
from dflash_local.controller.acceptance import Acceptance
from dflash_local.controller.calibration import budget_s, measure
from dflash_local.controller.costs import Costs
from dflash_local.copies.chances import CopyPrior
from dflash_local.draft.drafter import Drafter
from dflash_local.target_model.target import Target

_KIND = "costs"
_FORMAT = 10


def read(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    """All that is kept of a pair, for JSON; empty if there is nothing, or it cannot be read."""
    known = disk_cache.read(_KIND, _key(target, drafter))
    return known if isinstance(known, dict) else {}


def costs(
    target: Target, drafter: Drafter | None, *, before: Callable[[], None], again: bool = False
) -> Costs:
    """The costs of this pair: those kept, if there are any, unless `again` asks for new ones.

    Costs that are noisy (`Costs.noise`) are measured again, and those measured with a smaller
    budget. `before` empties all caches, if anything is measured. Raises as `calibration.measure`.
    """
    known = {} if again else read(target, drafter)
    with suppress(ValueError):  # not measured yet, or damaged
        found = Costs.from_dict(known)
        if found.noise is None and found.budget_s >= budget_s():
            return found
    before()
    found = measure(target, drafter)
    # What drafts and copies are worth is not measured; `again` begins with nothing.
    disk_cache.write(_KIND, _key(target, drafter), known | found.as_dict())
    return found


def known_copies(target: Target, drafter: Drafter | None) -> CopyPrior:
    """The record of this model's copies from earlier processes; else a new one."""
    with suppress(ValueError, LookupError, TypeError):
        return CopyPrior.from_dict(read(target, drafter)["copies"])
    return CopyPrior()


def known_drafts(target: Target, drafter: Drafter, n_nodes: int) -> list[Acceptance]:
    """The records of this drafter from earlier processes, of greedy requests and of those that
    sample; else new ones. `n_nodes` are the most of a tree."""
    size = min(drafter.block_size, target.max_width)
    with suppress(ValueError, LookupError, TypeError):
        greedy, sampled = read(target, drafter)["drafts"]
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
    disk_cache.write(_KIND, _key(target, drafter), kept)


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
