"""Context features: the hidden states of the target that a drafter reads, one row per token.

They stay on the device where the target computed them. `numpy.asarray` copies them to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dflash_local.target_model.target import Target


class StoredFeatures:
    """Rows of a target's store of features, given by their numbers there.

    It looks like an array, float32 [n, n_features]. The rows are overwritten once as many as the
    store holds have been decoded after them. Reading them then raises InputError. `tokens` are
    those of the rows, which is all that there is if no layers are tapped.
    """

    def __init__(self, target: Target, rows: Sequence[int], tokens: Sequence[int] = ()) -> None:
        self.target = target
        self.rows = list(rows)
        self.tokens = list(tokens)

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
