"""The store of saved sequences of a target and a drafter, and what must be equal for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dflash_local.draft.drafter import Drafter
from dflash_local.engine.prefix_files import PrefixFiles
from dflash_local.engine.prefixes import PrefixStore
from dflash_local.llama import runtime
from dflash_local.target.target import Target


def open_store(
    target: Target,
    drafter: Drafter | None,
    cache_mb: int,
    cache_dir: str | os.PathLike[str] | None,
    say: Callable[[str], None],
) -> PrefixStore | None:
    """A store of `cache_mb` MiB in memory and, with a folder, as many on disk; None for 0.

    Raises InputError for a folder that cannot be used.
    """
    if not cache_mb:
        return None
    max_bytes = cache_mb << 20
    files = None
    if cache_dir is not None:
        files = PrefixFiles(cache_dir, state_key(target, drafter), max_bytes, say)
    return PrefixStore(max_bytes, files)


def state_key(target: Target, drafter: Drafter | None) -> dict[str, Any]:
    """Everything that saved keys, values and drafter rows depend on, for JSON.

    Every option of the target counts unless it is known not to matter, so that a new one cannot be
    forgotten here. `n_ctx` does matter: llama.cpp chooses RoPE factors by it.
    """
    options = asdict(target.options)
    for name in ("n_seq", "n_branches", "tapped_layers"):
        del options[name]
    key: dict[str, Any] = {
        "machine": runtime.machine(),
        "target": target.file_key,
        "options": options,
    }
    if drafter is not None:
        key["drafter"] = [type(drafter).__name__, drafter.file_key, drafter.draft_window]
    return key
