"""A drafter that is one static graph of ours in C++, with a cache of its own."""

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.drafter import Drafter
from dflash_local.errors import ClosedError
from dflash_local.llama import native

Graph = TypeVar("Graph", native.FusedDrafter, native.HeadsDrafter)


class GraphDrafter(Drafter, Generic[Graph]):
    """Hands its cache's methods on to `_graph`, which is None once it is closed."""

    saves_rows = True
    _graph: Graph | None = None

    @property
    def _open(self) -> Graph:
        if self._graph is None:
            raise ClosedError("this drafter is closed; load it again")
        return self._graph

    @property
    def n_builds(self) -> int:  # type: ignore[override]
        """Graphs built so far: one for each size of context, number of rows and length of draft."""
        return self._open.n_builds

    def length(self, seq: int) -> int:
        return self._open.length(seq)

    def truncate(self, seq: int, length: int) -> None:
        self._open.truncate(seq, min(length, self._open.length(seq)))

    def copy(self, source: int, target: int, length: int) -> None:
        self._open.copy(source, target, length)

    def save(self, seq: int) -> NDArray[np.uint8]:
        return self._open.save(seq)

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        self._open.restore(seq, saved)

    def close(self) -> None:
        self._graph = None
