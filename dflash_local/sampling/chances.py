"""By which chances llama.cpp draws among the likeliest tokens of a row."""

import numpy as np
from numpy.typing import NDArray

from dflash_local.sampling.params import SamplingParams


def chances_of(
    logprobs: NDArray[np.float64], sampling: SamplingParams, n_vocab: int
) -> NDArray[np.float64]:
    """The chances of the likeliest of `n_vocab` tokens, [n, k], which add up to 1 in each row,
    given their log-probabilities [n, k], the largest first.

    Cut as llama.cpp does, before the temperature: top_k, top_p of the rest, min_p. All other
    samplers are left out: penalties depend on the text before.
    """
    places = np.arange(logprobs.shape[1])
    if sampling.greedy:
        return np.where(places == 0, 1.0, np.zeros_like(logprobs))
    if 0 < sampling.top_k < n_vocab:
        if sampling.top_k <= len(places):
            kept = np.exp(logprobs[:, : sampling.top_k]).sum(axis=1, keepdims=True)
            logprobs = logprobs - np.log(kept)
        logprobs = np.where(places < sampling.top_k, logprobs, -np.inf)
    probs = np.exp(logprobs)
    cut = probs < sampling.min_p * probs[:, :1]
    if sampling.top_p < 1:
        cut |= probs.cumsum(axis=1) - probs >= sampling.top_p
    cut &= places > 0
    rows = np.where(cut, -np.inf, logprobs / sampling.temperature)
    exps = np.exp(rows - rows[:, :1])
    found: NDArray[np.float64] = exps / exps.sum(axis=1, keepdims=True)
    return found
