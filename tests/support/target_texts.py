"""Texts of a target, to train a drafter on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_local.engine.engine import Engine
from dflash_local.target_model.target import Target
from pair_engine import prefill, request


@dataclass(frozen=True)
class Text:
    """A text of the target: a prompt, its greedy answer, and the context feature of each token."""

    tokens: list[int]
    n_prompt: int
    features: NDArray[np.float32]


def written(target: Target, texts: Sequence[str], n_tokens: int) -> list[Text]:
    """Greedy answers of a target that is open for several sequences, without a drafter."""
    n_seq = target.options.n_seq
    engine = Engine(target, None, n_seq)
    found = []
    for first in range(0, len(texts), n_seq):
        ids = [target.vocabulary.tokenize(text) for text in texts[first : first + n_seq]]
        ids = [tokens[:160] for tokens in ids if tokens]
        sequences = [engine.begin(request(tokens, 0, n_tokens)) for tokens in ids]
        engine.run(sequences)
        engine.slots.forget_all()
        for tokens, sequence in zip(ids, sequences, strict=True):
            whole = [*tokens, *sequence.tokens]
            features = prefill(target, whole).copy()
            target.clear(0)
            found.append(Text(whole, len(tokens), features))
    return found
