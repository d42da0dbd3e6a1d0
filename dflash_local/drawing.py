"""The target's token after a row of a pass, with no more of its logits than the sampler needs."""

from __future__ import annotations

from functools import partial

from dflash_local.sampling import not_finite
from dflash_local.sequence import Sequence
from dflash_local.target import Target


def draw(target: Target, sequence: Sequence, row: int, output_row: int) -> int:
    """The target's token after a row of the last batch, the `output_row`-th with logits."""
    sampler = sequence.sampler
    whole = partial(target.logits, row)
    if sequence.request.sampling.logprobs is not None:
        logits = whole()
        token = sampler.sample(logits)
        sequence.logprobs.append(sampler.logprobs(logits, token))
        return token
    if sampler.begins_with_best:
        best = target.best()[output_row]
        if best < 0:
            raise not_finite()
        return sampler.sample_best(best, whole)
    n_candidates = sampler.n_candidates
    if n_candidates is not None:
        return sampler.sample_from(*target.candidates(output_row, n_candidates), whole)
    return sampler.sample(whole())
