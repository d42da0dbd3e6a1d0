"""Context features: what a drafter reads of the target, a row for each token.

They stay where the target computed them, on its device, and come to the host only for those who ask
with `numpy.asarray`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dflash_local.target.target import Target


class StoredFeatures:
    """Rows of a target's store of tapped hidden states, by their numbers there.

    Looks like float32 [n, n_features]. The rows are overwritten, and then an InputError to read,
    once `target.n_stored` later ones have been decoded.
    """

    def __init__(self, target: Target, rows: Sequence[int]) -> None:
        self.target = target
        self.rows = list(rows)

    ndim = 2
    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.target.n_features

    def __len__(self) -> int:
        return len(self.rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.target.stored(self.rows), dtype)


Features: TypeAlias = NDArray[np.float32] | StoredFeatures
"""Context features, float32 [n, n_features]."""
