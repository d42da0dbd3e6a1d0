"""Which drafter runs a file: the fused graph where it knows the family, else llama.cpp's own."""

from __future__ import annotations

import os

from dflash_local.drafter import TOP_K, TREE_TOP_K, Drafter, FusedDrafter
from dflash_local.drafter_spec import DrafterSpec
from dflash_local.drafter_tensors import Runner
from dflash_local.errors import FileError
from dflash_local.gguf_file import GgufFile
from dflash_local.llama_drafter import LlamaDrafter
from dflash_local.target import Target


def open_drafter(
    path: str | os.PathLike[str],
    target: Target,
    spec: DrafterSpec | None = None,
    *,
    n_seq: int,
    n_ctx: int,
    draft_window: int = 0,
    n_threads: int | None = None,
    runs_on: Runner | None = None,
    for_trees: bool = False,
) -> Drafter:
    """The drafter at `path` for a loaded target, which closes it; `spec` when it is read already.

    `n_ctx` rows for each of `n_seq` sequences, of which drafts look at the last `draft_window`; 0:
    at all. `runs_on` overrides the choice by file: llama.cpp
    runs every family, but none with biases. `for_trees` has several candidates for each position,
    where the drafter can give them. Raises FileError for a bad file, BackendError without
    room.
    """
    if spec is None:
        spec = DrafterSpec.read(GgufFile.open(path), n_vocab=target.n_vocab)
    if (runs_on or spec.runs_on) == "fused":
        return FusedDrafter(
            path,
            target,
            n_seq=n_seq,
            n_ctx=n_ctx,
            draft_window=draft_window,
            top_k=TREE_TOP_K if for_trees else TOP_K,
            n_threads=n_threads,
        )
    if spec.attention_bias:
        raise FileError(f"{path}: llama.cpp loads no drafter whose attention has biases")
    return LlamaDrafter(
        path,
        target,
        spec,
        n_seq=n_seq,
        n_ctx=n_ctx,
        draft_window=draft_window,
        n_threads=n_threads,
    )
