"""A target whose logits are given rows, to the bit.

Token i has the i-th row. The model's layers do nothing; its output matrix holds a row in each
column. llama.cpp maps the file, so what is written into it later is what the next pass computes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from gguf_files import Tensor, changed
from synthetic import write_target

MOST_ROWS = 64
_HIDDEN = np.float32(4)  # the one value of a normed hidden state that is not 0
_LARGEST = np.float32(3e38)  # times that it is infinite; an infinity times 0 would be a NaN


class GivenRows:
    """`target` is open, on the CPU."""

    def __init__(self, folder: Path, n_vocab: int, n_seq: int = 1) -> None:
        self.n_vocab = n_vocab
        plain = write_target(
            folder / "random.gguf", n_layer=1, n_embd=MOST_ROWS, n_vocab=n_vocab, tied=False
        )
        path = changed(plain, folder / "given.gguf", tensors=_without_layers)
        offset = GgufFile.open(path).tensors["output.weight"].offset
        self._columns = np.memmap(path, np.float32, "r+", offset, (n_vocab, MOST_ROWS))
        self.target = Target(path, TargetOptions(n_ctx=256, n_seq=n_seq, n_threads=1))

    def decode(self, rows: Sequence[NDArray[np.float32]]) -> None:
        """Let these be the output rows of the target's last pass, float32 [n_vocab] each."""
        self.give(rows)
        n = len(rows)
        self.target.clear(0)
        self.target.decode(range(n), range(n), [0] * n, [True] * n)

    def give(self, rows: Sequence[NDArray[np.float32]]) -> None:
        """From now on the i-th of these follows token i."""
        for i, row in enumerate(rows):
            self._columns[:, i] = np.clip(row / _HIDDEN, -_LARGEST, _LARGEST)

    def close(self) -> None:
        self.target.close()


def _without_layers(tensors: dict[str, Tensor]) -> None:
    def of(value: float, name: str) -> None:
        data, kind = tensors[name]
        tensors[name] = np.full_like(data, value), kind

    for name in tensors:
        if name.startswith("blk."):
            of(1 if "norm" in name else 0, name)
    of(0, "output.weight")
    of(_HIDDEN / np.sqrt(np.float32(MOST_ROWS)), "output_norm.weight")
    # So large that the norm's epsilon is nothing beside it.
    of(0, "token_embd.weight")
    np.fill_diagonal(tensors["token_embd.weight"][0], 1024)
