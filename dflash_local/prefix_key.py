"""The store of saved sequences of a target and a drafter, and what must be equal for them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_local import runtime
from dflash_local.drafter import Drafter, SavesRows
from dflash_local.errors import InputError
from dflash_local.prefix_files import PrefixFiles
from dflash_local.prefix_store import PrefixStore
from dflash_local.target import Target

_BLOCK = 1 << 16
_BLOCKS = 64


def check_store(cache_mb: int, cache_dir: str | os.PathLike[str] | None) -> None:
    """Raises InputError for what `open_store` cannot open, whatever the models."""
    if isinstance(cache_mb, bool) or not isinstance(cache_mb, int) or cache_mb < 0:
        raise InputError(f"cache_mb is {cache_mb!r}; expected a whole number of MiB, 0 or more")
    if cache_dir is not None and not cache_mb:
        raise InputError("cache_dir needs room in memory, too; give cache_mb, 1 or more")


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
    """The files of both, llama.cpp's build, and the options that change what is saved; as JSON.

    Raises OSError for a file that is gone.
    """
    options = target.options
    key: dict[str, Any] = {
        "target": file_mark(target.path),
        "build": runtime.llama_build(),
        "n_embd": target.n_embd,
        "n_layer": target.n_layer,
        "n_swa": target.n_swa,
        "kv_type": options.kv_type,
        "flash_attn": options.flash_attn,
    }
    if isinstance(drafter, SavesRows):
        key["drafter"] = type(drafter).__name__
        key["drafter_file"] = file_mark(Path(getattr(drafter, "path", "")))
        key["draft_window"] = getattr(drafter, "draft_window", 0)
    return key


def file_mark(path: Path) -> list[Any]:
    """Changes with a file: its size, its time, and a digest of parts all over it, as models are too
    large to be read whole. Not its name: a file may be moved."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        for i in range(_BLOCKS):
            file.seek(max(0, stat.st_size - _BLOCK) * i // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return [stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
