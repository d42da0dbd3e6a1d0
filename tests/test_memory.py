"""Memory does not grow with the number of requests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

from dflash_local import Model, demo, load
from dflash_local.draft.draft import ANCHOR
from dflash_local.target.batch import Batch
from pair_engine import open_target

# What the allocator may still gain after 100 requests: arenas of new threads' first use, a heap
# that fragments. A leak of a row of logits (32 KB) or of the features of a round (6 KB and more)
# in each request, or of a sampler (100 KB), adds up to more than this in 200 requests.
BOUND = 3 * 2**20


def resident_bytes() -> int:
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024


@pytest.mark.slow
def test_memory_is_flat_over_300_requests() -> None:
    draw = random.Random(0)
    prompts = [prompt for kind in demo.prompts().values() for prompt in kind]
    with load(*demo.pair(), n_ctx=256, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        used = {}
        for n in range(1, 301):
            one_request(model, draw, draw.choice(prompts))
            if n in (100, 200, 300):
                used[n] = resident_bytes()
    print({n: f"{size / 2**20:.1f} MiB" for n, size in used.items()})
    assert used[300] - used[100] < BOUND


def one_request(model: Model, draw: random.Random, prompt: str) -> None:
    """Any kind of request; every third is cancelled, or left, after some chunks."""
    cancel = threading.Event()
    chunks = model.stream(
        prompt,
        max_tokens=draw.randint(1, 10),
        draft_width=draw.choice([0, 2, 8, 16, 16]),
        temperature=draw.choice([0.0, 0.8]),
        repeat_penalty=draw.choice([1.0, 1.1]),
        grammar=draw.choice([None, None, "root ::= [a-z ]+"]),
        logprobs=draw.choice([None, 2]),
        cancel=cancel,
    )
    how = draw.choice(["whole", "whole", "whole", "whole", "cancelled", "left"])
    last = draw.randint(1, 4)
    for n, _ in enumerate(chunks, 1):
        if n == last and how == "left":
            break
        if n == last and how == "cancelled":
            cancel.set()


@pytest.mark.slow
def test_a_wide_tree_takes_what_is_planned_for_its_ids() -> None:
    """All ids of a sequence then bear all of its tokens. In a process of its own, in which nothing
    has been freed before."""
    n_tokens, n_branches = 1536, 64
    with multiprocessing.get_context("spawn").Pool(1) as child:
        grown = child.apply(grown_by_ids, (n_tokens, n_branches))
    planned = 48 * n_tokens * (n_branches - 1)
    assert 0.8 * planned < grown < 1.2 * planned + BOUND


def grown_by_ids(n_tokens: int, n_branches: int) -> int:
    """Bytes that a pass over a tree takes after so many tokens."""
    with open_target(n_ctx=2048, n_branches=n_branches) as target:
        for begin in range(0, n_tokens, 512):
            target.decode([7] * 512, range(begin, begin + 512), [0] * 512, [False] * 512)
        before = resident_bytes()
        batch, nodes = Batch(), range(n_branches - 2)
        batch.add_tree(0, n_tokens, 5, [6 + i for i in nodes], [ANCHOR] * len(nodes))
        target.run(batch)
        return resident_bytes() - before
