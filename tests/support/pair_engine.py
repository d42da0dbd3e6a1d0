"""The mini pair as a bare engine: target, drafter, and runs of requests through them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import mini_pair
from dflash_local.draft.drafter import Drafter
from dflash_local.draft.fused_drafter import TREE_TOP_K, FusedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.request import Request
from dflash_local.engine.sequence import Sequence as Answer
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.sampling.params import SamplingParams
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target

Width = int | Literal["auto"]


@contextmanager
def open_target(
    path: Path | None = None,
    *,
    n_ctx: int = 512,
    n_seq: int = 1,
    n_batch: int = 512,
    kv_type: str = "q8_0",
    n_threads: int | None = 1,
    flash_attn: bool = True,
    n_branches: int = 1,
    tapped_layers: tuple[int, ...] | None = None,
    exact: bool = False,
) -> Iterator[Target]:
    """The mini target, or one that the tiny drafter is for, on the CPU with the layers tapped as
    its drafter wants.

    One thread: those that wait for each other by spinning make tests that share the machine's cores
    many times slower, and any number of them computes the same in a q8_0 cache.
    """
    path = path or mini_pair.pair()[0]
    layers = read_drafter(GgufFile.open(mini_pair.drafter_of(path))).target_layers
    options = TargetOptions(
        n_ctx=n_ctx,
        n_seq=n_seq,
        n_batch=n_batch,
        n_threads=n_threads,
        kv_type=kv_type,
        flash_attn=flash_attn,
        tapped_layers=layers if tapped_layers is None else tapped_layers,
        n_branches=n_branches,
        exact=exact,
    )
    with Target(path, options) as target:
        yield target


def fused_drafter(target: Target) -> FusedDrafter:
    """The drafter for an open target, which closes it; with candidates for trees where the target
    takes them."""
    drafter = mini_pair.drafter_of(target.path)
    return FusedDrafter(
        drafter,
        target,
        read_drafter(GgufFile.open(drafter)),
        n_seq=target.options.n_seq,
        n_ctx=target.options.n_ctx,
        top_k=TREE_TOP_K if target.options.n_branches > 1 else 1,
    )


@contextmanager
def open_engine(**options: Any) -> Iterator[Engine]:
    """Both at work; options are those of `open_target`."""
    with open_target(**options) as target:
        yield Engine(target, fused_drafter(target), n_seq=target.options.n_seq)


def request(
    prompt: Sequence[int],
    width: Width,
    max_tokens: int | None = 48,
    *,
    shape: DraftShape = "chain",
    owner: str | None = None,
    n_keep: int | None = None,
    **params: Any,
) -> Request:
    sampling = SamplingParams(**params)
    return Request(
        list(prompt), sampling, max_tokens, width, draft_shape=shape, owner=owner, n_keep=n_keep
    )


def answer(
    engine: Engine, prompt: Sequence[int], width: Width, max_tokens: int | None = 48, **options: Any
) -> Answer:
    """One request, run to its end; options are those of `request`."""
    sequence = engine.begin(request(prompt, width, max_tokens, **options))
    engine.run([sequence])
    return sequence


def prefill(target: Target, tokens: Sequence[int], seq: int = 0) -> NDArray[np.float32]:
    """Hidden states of `tokens` in an empty sequence, float32 [n, n_features]; the logits of the
    last row are `target.logits(len(tokens) - 1)`. At most one batch."""
    target.clear(seq)
    n = len(tokens)
    target.decode(tokens, range(n), [seq] * n, [False] * (n - 1) + [True])
    return target.hidden_states().reshape(n, -1)


def consistent(engine: Engine, drafter: Drafter, n_cached: int, seq: int = 0) -> None:
    """Fail unless both caches of a slot end at the same token, `n_cached`."""
    assert (len(engine.slots[seq].cached), drafter.length(seq)) == (n_cached, n_cached)
