"""Made-up machines: the costs of a round's parts there, for simulated rounds."""

import math
import random
from bisect import bisect_left
from dataclasses import dataclass, replace

from dflash_local.controller.costs import Costs
from drafted_text import BLOCK

SHALLOW, DEEP = 4, 8192
"""Cached tokens at which a calibration measures; each sequence has the first."""
_CALIBRATED = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32, 64)


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of a pass by its rows, on straight lines between; of a draft, of each sequence
    more in it, and of each token after the first if drafts are made token by token; of a change of
    the number of rows; of an injected row; of the host's part with and without drafts; of a
    thousand cached tokens in a pass, and for each of its rows; of a tree.

    `after_draft` is what a pass takes longer after a draft than alone. `noise` is the standard
    deviation of the logarithms of the times that a controller sees. From the token `slow_at` of a
    session on, everything takes `slow` times as long: a hot machine. `busy`: times were measured by
    so much too long.
    """

    name: str
    steps: dict[int, float]
    draft: float
    draft_more: float
    switch: float
    inject: float
    host: float = 0.1
    draft_host: float = 0.15
    tokens: float = 0.0
    row_tokens: float = 0.0
    draft_token: float = 0.0
    tree: float = 0.1
    after_draft: float = 0.0
    noise: float = 0.04
    slow: float = 1.0
    slow_at: int = 1000
    busy: float = 1.0
    takes_trees: bool = True

    def step(self, rows: int, depth: int = 0, shape: str = "chain") -> float:
        known = sorted(self.steps)
        i = min(max(bisect_left(known, rows), 1), len(known) - 1)
        few, many = known[i - 1], known[i]
        ms = self.steps[few] + (rows - few) / (many - few) * (self.steps[many] - self.steps[few])
        ms += depth / 1000 * (self.tokens + self.row_tokens * rows)
        return ms + (self.tree if shape == "tree" else 0.0)

    def drafts(self, n_seqs: int, n_tokens: int) -> float:
        first = self.draft + self.draft_more * (n_seqs - 1) if n_seqs else 0.0
        return first + self.draft_token * (n_tokens - 1)

    def costs(self, n_seqs: int, seed: int = 0, block_size: int = BLOCK) -> Costs:
        """As a calibration would find them: some row counts only, and each a little wrong."""
        n_draft = block_size - 1
        rng = random.Random(n_seqs + 100 * seed)
        rows = sorted({m * n for n in _CALIBRATED for m in (1, n_seqs) if m * n <= 128})

        def seen(ms: float) -> float:
            return 1e-3 * self.busy * ms * noisy(rng, self.noise / 2, 0.0)

        shallow = SHALLOW * n_seqs
        return Costs(
            {depth: {n: seen(self.step(n, depth)) for n in rows} for depth in (shallow, DEEP)},
            {shallow: {n: seen(self.drafts(n, n_draft)) for n in {1, n_seqs}}},
            switch_s=seen(self.switch),
            host_s=1e-3 * self.host,
            draft_host_s=1e-3 * self.draft_host,
            inject_s=seen(self.inject),
            token_share=self.draft_token / self.drafts(1, n_draft),
            trees={shallow: seen(self.tree)} if self.takes_trees else None,
        )


def noisy(rng: random.Random, sigma: float, hiccups: float = 0.004) -> float:
    """A factor of a time: mostly near 1, now and then many times that, when the system was busy."""
    if rng.random() < hiccups:
        return rng.uniform(2.0, 8.0)
    return math.exp(rng.gauss(0.0, sigma))


_H200_Q4 = Machine(  # a model of Qwen3-8B's shape on an H200, as measured
    "h200-8b-q4",
    {1: 3.83, 2: 4.35, 4: 5.73, 8: 8.52, 9: 7.92, 16: 8.33, 24: 9.15, 32: 10.16, 64: 13.6,
     128: 19.0},
    draft=2.0, draft_more=0.1, switch=5.9, inject=0.002, tokens=0.07, row_tokens=0.002,
)  # fmt: skip
_CPU_TINY = Machine(  # the tiny pair on two cores: a check of two tokens costs 2.7 steps
    "cpu-tiny",
    {1: 1.15, 2: 3.1, 4: 5.2, 8: 7.4, 16: 9.6, 32: 18.0, 64: 35.0, 128: 69.0},
    draft=4.5, draft_more=3.5, switch=0.1, inject=0.08, tokens=0.3, row_tokens=0.1,
    takes_trees=False,
)  # fmt: skip
_TUNED_ON = [
    _H200_Q4,
    Machine(  # 32 rows are cheaper than 16
        "h200-8b-bf16",
        {1: 4.97, 2: 5.3, 4: 6.2, 8: 7.92, 16: 8.64, 17: 7.2, 32: 7.41, 64: 8.43, 128: 12.0},
        draft=2.0, draft_more=0.1, switch=5.9, inject=0.002, tokens=0.07, row_tokens=0.002,
    ),
    Machine(  # the first of them with kernels for few rows
        "h200-8b-flat",
        {1: 3.45, 8: 4.21, 16: 4.79, 32: 6.32, 64: 10.5, 128: 19.0},
        draft=1.3, draft_more=0.08, switch=0.05, inject=0.002, tokens=0.07, row_tokens=0.002,
    ),
    replace(_H200_Q4, name="h200-8b-hot", after_draft=1.0, slow=1.4, noise=0.08),
    Machine(  # experts: more rows read more of them
        "moe",
        {1: 4.0, 2: 5.6, 4: 8.0, 8: 11.5, 16: 15.0, 32: 18.0, 64: 21.0, 128: 25.0},
        draft=2.0, draft_more=0.1, switch=3.0, inject=0.002, tokens=0.05, row_tokens=0.002,
    ),
    Machine(  # a draft costs as much as a step
        "tiny-gpu",
        {1: 0.35, 2: 0.40, 4: 0.44, 8: 0.55, 9: 0.62, 16: 0.75, 32: 1.0, 64: 1.5, 128: 2.6},
        draft=0.35, draft_more=0.05, switch=0.8, inject=0.001, host=0.05, draft_host=0.06,
        tokens=0.02, row_tokens=0.001, tree=0.04,
    ),
    Machine(
        "laptop-gpu",
        {1: 22.0, 2: 24.0, 4: 30.0, 8: 48.0, 9: 50.0, 16: 62.0, 32: 110.0, 64: 210.0, 128: 410.0},
        draft=6.0, draft_more=2.0, switch=4.0, inject=0.05, tokens=0.8, row_tokens=0.05,
    ),
    _CPU_TINY,
    replace(_CPU_TINY, name="cpu-tiny-noisy", noise=0.15),
    Machine(
        "cpu-8b",
        {1: 180.0, 2: 190.0, 4: 260.0, 8: 480.0, 16: 900.0, 32: 1750.0, 64: 3500.0, 128: 7000.0},
        draft=110.0, draft_more=80.0, switch=1.0, inject=1.0, tokens=8.0, row_tokens=2.0,
        takes_trees=False,
    ),
]  # fmt: skip
_KEPT_OUT = [
    Machine(
        "rtx-4090",
        {1: 7.0, 2: 7.3, 4: 8.0, 8: 10.5, 9: 12.0, 16: 13.0, 32: 17.0, 64: 28.0, 128: 52.0},
        draft=1.6, draft_more=0.2, switch=2.0, inject=0.003, tokens=0.25, row_tokens=0.006,
    ),
    Machine(  # a new graph costs five steps: the tiny pair as measured on an H200
        "tiny-h200",
        {1: 0.32, 2: 0.37, 4: 0.41, 8: 0.46, 9: 0.95, 16: 1.02, 32: 1.23, 64: 1.47, 128: 2.4},
        draft=0.30, draft_more=0.035, switch=1.5, inject=0.001, host=0.01, draft_host=0.05,
        tokens=0.02, row_tokens=0.001, tree=0.03,
    ),
    Machine(  # with kernels for few rows
        "tiny-h200-flat",
        {1: 0.29, 8: 0.35, 16: 0.40, 32: 0.53, 64: 0.9, 128: 1.7},
        draft=0.25, draft_more=0.03, switch=0.02, inject=0.001, host=0.01, draft_host=0.05,
        tokens=0.02, row_tokens=0.001, tree=0.03,
    ),
    Machine(
        "h200-35b-a3b",
        {1: 3.2, 2: 4.1, 4: 5.4, 8: 6.9, 16: 9.8, 32: 13.0, 64: 18.0, 128: 26.0},
        draft=1.5, draft_more=0.1, switch=3.5, inject=0.002, tokens=0.03, row_tokens=0.001,
        noise=0.06,
    ),
    Machine(  # by the row: two rows cost two steps, less what is read once
        "cpu-two-cores",
        {1: 2.0, 2: 3.9, 4: 6.8, 8: 11.5, 16: 20.0, 32: 38.0, 64: 75.0, 128: 150.0},
        draft=6.0, draft_more=4.0, switch=0.1, inject=0.15, tokens=0.5, row_tokens=0.2,
        noise=0.12, takes_trees=False,
    ),
    Machine(  # measured while the machine was busy
        "cpu-busy-at-first",
        {1: 40.0, 2: 42.0, 4: 50.0, 8: 75.0, 16: 130.0, 32: 250.0, 64: 490.0, 128: 970.0},
        draft=18.0, draft_more=9.0, switch=0.5, inject=0.3, tokens=2.0, row_tokens=0.4,
        noise=0.08, busy=2.5, takes_trees=False,
    ),
]  # fmt: skip
MACHINES = {machine.name: machine for machine in [*_TUNED_ON, *_KEPT_OUT]}
KEPT_OUT = [machine.name for machine in _KEPT_OUT]
"""Machines on which no rule or number was tried."""
