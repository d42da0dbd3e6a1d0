"""Saved sequences whose content their tokens tell."""

import random
from pathlib import Path

import numpy as np

from dflash_local.prefixes.files import PrefixFiles
from dflash_local.prefixes.prefix import SavedSequence

KEY = {"target": "one"}
LARGE = 1 << 20


def entry(
    *tokens: int,
    size: int = 1000,
    n_least: int = 0,
    n_drafter: int | None = None,
    checkpoints: tuple[int, ...] = (),
    owner: str = "",
) -> SavedSequence:
    """Content that its tokens tell."""
    content = np.frombuffer(random.Random(str(tokens)).randbytes(size), np.uint8)
    return SavedSequence(
        list(tokens),
        n_least,
        len(tokens) if n_drafter is None else n_drafter,
        checkpoints=checkpoints,
        owner=owner,
        target=content[: size // 2],
        drafter=content[size // 2 :],
        states=tuple(content[: 10 + length] for length in checkpoints),
    )


def files(folder: Path, max_bytes: int = LARGE, key: dict[str, str] = KEY) -> PrefixFiles:
    return PrefixFiles(folder, key, max_bytes)
