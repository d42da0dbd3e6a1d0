"""A planned tensor of the GGUF file, and its rows as they come from the checkpoint."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the GGUF file, and how it is made from the checkpoint.

    `shape` is in ggml's order: ne0, the length of a row, first. The checkpoint's rows (along its
    first axis) stay as they are, unless one of the fields below says otherwise.
    """

    name: str
    source: str  # its name in the checkpoint; empty for a tensor that is computed
    shape: tuple[int, ...]
    permute_heads: int = 0  # so many heads, whose rows are interleaved pairs of RoPE
    values: tuple[float, ...] = ()  # of a tensor that is computed

    @property
    def n_rows(self) -> int:
        """Rows of ne0 elements."""
        return int(np.prod(self.shape[1:], dtype=np.int64))


class RowSource(Protocol):
    """Gives rows along a tensor's first axis; of a vector, its elements."""

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]: ...


def planned_rows(source: RowSource, plan: TensorPlan, start: int, stop: int) -> NDArray[np.float32]:
    """Rows `start` to `stop` of the GGUF tensor: [stop - start, ne0], float32.

    A vector is one row. Only these rows are read; if heads are permuted, all rows of their heads.
    """
    width = plan.shape[0]
    if plan.values:
        return np.asarray(plan.values, dtype=np.float32)[np.newaxis][start:stop]
    if len(plan.shape) == 1:
        vector = source.rows(plan.source, 0, width).reshape(width)
        if plan.permute_heads:
            vector = vector[_halves(width // plan.permute_heads, plan.permute_heads)]
        return vector[np.newaxis][start:stop]
    # One index of the checkpoint's first axis may hold several rows, and heads are permuted whole.
    inner = plan.n_rows // plan.shape[-1]
    size = plan.n_rows // plan.permute_heads if plan.permute_heads else inner
    first, last = start // size, -(-stop // size)
    rows = source.rows(plan.source, first * size // inner, last * size // inner).reshape(-1, width)
    if plan.permute_heads:
        rows = rows[_halves(size, last - first)]
    return rows[start - first * size : stop - first * size]


def interleaved(plan: TensorPlan) -> NDArray[np.intp]:
    """For a plan with `permute_heads`: for each row of the GGUF tensor, that of the checkpoint."""
    return _halves(plan.shape[-1] // plan.permute_heads, plan.permute_heads)


def _halves(head: int, n_heads: int) -> NDArray[np.intp]:
    """For every head the even rows, then the odd ones: interleaved pairs become halves."""
    rows: NDArray[np.intp] = np.arange(head * n_heads, dtype=np.intp)
    return np.ascontiguousarray(rows.reshape(n_heads, head // 2, 2).transpose(0, 2, 1)).ravel()
