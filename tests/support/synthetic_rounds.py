"""Rounds with synthetic acceptance, without an engine."""

from __future__ import annotations

import numpy as np

from dflash_local.bench.synthetic.acceptance import SyntheticAcceptance
from dflash_local.bench.synthetic.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Chain, Tree
from dflash_local.engine.accept import Verdict

EOS = 7
N_VOCAB = 4096
OWN_LENGTH = 3.74
"""Tokens a round of the recorded passages, each drawn as often as the others."""


def proposal(n: int = 15, k: int = 8) -> Draft:
    """What a drafter of random weights gives: tokens 100 + 8 i + r, and log-probabilities that say
    nothing."""
    ids = (100 + 8 * np.arange(n)[:, None] + np.arange(k)).astype(np.int32)
    logprobs = np.full((n, k), -9.0, np.float32)
    return Draft.chain(ids[:, 0].tolist(), logprobs[:, 0].tolist(), Candidates(ids, logprobs))


def shaped(draft: Draft, width: int, *, tree: bool) -> Draft:
    """What the engine makes of it for a verify pass of `width` rows."""
    n = width - 1
    if not tree:
        return Chain(n).cut(draft, N_VOCAB, n, None)
    return Tree(n, 65).cut(draft, N_VOCAB, n, None)


def play(synthetic: SyntheticAcceptance, draft: Draft, drawn: int = 1000) -> Verdict:
    return synthetic.accept(draft, lambda _row: drawn, lambda token: token == EOS)


def lengths(
    synthetic: SyntheticAcceptance, n: int, *, width: int = 16, tree: bool = False, k: int = 8
) -> list[int]:
    """Tokens of each of n rounds."""
    found = []
    for _ in range(n):
        draft = shaped(synthetic.mark(proposal(k=k)), width, tree=tree)
        found.append(len(play(synthetic, draft).tokens))
    return found


def synthetic(length: float = OWN_LENGTH, seed: int = 0) -> SyntheticAcceptance:
    return SyntheticAcceptance(RecordedDrafts.shipped(), length, seed)
