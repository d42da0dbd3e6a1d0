"""A row of logits, whole or its largest, as a target would give it to a sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class CountedRow:
    """Counts how often it is fetched whole."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.logits = logits
        self.fetched = 0

    def __call__(self) -> NDArray[np.float32]:
        self.fetched += 1
        return self.logits
