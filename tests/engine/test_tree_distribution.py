"""Sampled answers have the law of the target, whatever tree they are drafted by: the production
verifier and llama.cpp's sampler, over a table of logits in place of a model."""

import math

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.tree import grow
from dflash_local.engine.accept import accept
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler

N_VOCAB, DEPTH, N_NODES = 7, 4, 11
N_SAMPLES = 50_000
LOGITS = np.random.default_rng(1).normal(0.0, 1.3, (N_VOCAB, N_VOCAB)).astype(np.float32)
"""After each token, those of the next one."""


def law() -> NDArray[np.float64]:
    """The chance of each next token, [token, next], computed from the table alone."""
    e = np.exp(LOGITS.astype(np.float64))
    return e / e.sum(axis=1, keepdims=True)


def drafted(rng: np.random.Generator, anchor: int) -> Draft:
    """A tree by a drafter that knows the target a little."""
    beliefs = LOGITS[anchor] + rng.normal(0.0, 1.0, (DEPTH, N_VOCAB)).astype(np.float32)
    logprobs = beliefs - np.log(np.exp(beliefs).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :4].astype(np.int32)
    return grow(Candidates(ids, np.take_along_axis(logprobs, ids, axis=1)), N_NODES, N_VOCAB)


def transitions() -> NDArray[np.int64]:
    """Counts of each token's followers, [token, next], in a text of `N_SAMPLES`."""
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
    sampler = Sampler(params, N_VOCAB, n_ctx=64)
    text = [0]
    accepted = 0
    drafts = [[drafted(rng, anchor) for _ in range(50)] for anchor in range(N_VOCAB)]
    while len(text) <= N_SAMPLES:
        draft = drafts[text[-1]][rng.integers(50)]
        held = [text[-1], *draft.tokens]  # by row, the anchor first
        verdict = accept(draft, lambda row: sampler.sample(LOGITS[held[row]]), lambda _: False)  # noqa: B023
        text += verdict.tokens
        accepted += len(verdict.path) - 1
    assert accepted > N_SAMPLES / 3
    counts = np.zeros((N_VOCAB, N_VOCAB), np.int64)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    return counts


def chi_square(counts: NDArray[np.int64]) -> tuple[float, float]:
    """Pearson's statistic of all rows together, and what it exceeds once in 10^4 fair tests
    (Wilson and Hilferty 1931)."""
    expected = law() * counts.sum(axis=1, keepdims=True)
    assert expected.min() > 5
    degrees = N_VOCAB * (N_VOCAB - 1)
    part = 2.0 / (9.0 * degrees)
    limit = degrees * (1.0 - part + 3.719 * math.sqrt(part)) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


def test_drafted_samples_have_the_law_of_the_target() -> None:
    found, limit = chi_square(transitions())
    assert found < limit
