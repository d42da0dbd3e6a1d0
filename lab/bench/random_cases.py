"""Random prompts and answers, for models of random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dflash_local.bench.prompts.case import Case

if TYPE_CHECKING:
    from dflash_local.target_model.target import Target


def random_cases(n_vocab: int, lengths: Mapping[str, int], *, limit: int) -> list[Case]:
    """Random token ids, for models of random weights; `lengths` by category, in tokens."""
    rng = np.random.default_rng(0)
    return [
        Case(category, index, rng.integers(*_usual_ids(n_vocab), n).tolist())
        for category, n in lengths.items()
        for index in range(limit)
    ]


def with_random_answers(target: Target, cases: Sequence[Case], n: int) -> list[Case]:
    """The cases with random answers of `n` tokens, none of which ends a text."""
    rng = np.random.default_rng(1)
    found = []
    for case in cases:
        drawn = rng.integers(*_usual_ids(target.n_vocab), 2 * n).tolist()
        answer = [token for token in drawn if not target.vocabulary.ends_text(token)]
        found.append(replace(case, answer=answer[:n]))
    return found


def _usual_ids(n_vocab: int) -> tuple[int, int]:
    """The first and the end of the ids that are words. In most vocabularies the first ones are
    control tokens or bytes, and the last ones control tokens."""
    return min(256, n_vocab // 4), max(n_vocab // 2, 1)
