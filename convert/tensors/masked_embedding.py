"""The embeddings of a drafter with a vector of its own for the mask token (`mask_embedding.pt`).

As in llama.cpp's converter (`conversion/qwen.py`), its file gets the target's embeddings with that
one row replaced, and the target's output head.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_local.errors import FileError, InputError
from dflash_local.gguf.file import GgufFile

from ..config.drafter_config import DraftConfig
from ..files.checkpoint import Checkpoint
from ..files.mask_embedding import read_mask_embedding
from ..files.source import MASK_EMBEDDING
from .plan import RowSource, TensorPlan

Origins = dict[str, tuple[TensorPlan, RowSource]]

_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class ReplacedRow:
    """The rows of `origin`, with `vector` in place of row `row`."""

    origin: RowSource
    row: int
    vector: NDArray[np.float32]

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self.origin.rows(name, start, stop)
        if start <= self.row < stop:
            rows = rows.copy()
            rows[self.row - start] = self.vector
        return rows


def masked_tensors(
    folder: Path, config: DraftConfig, weights: Checkpoint, target: GgufFile
) -> Origins:
    """Embeddings, and the output head unless the drafter has one, for a mask embedding in `folder`.

    Maps GGUF names to plans and to where their rows come from; empty without a mask embedding.
    Raises FileError for a mask embedding or target tensors of another shape, and InputError for a
    target that is not on this disk.
    """
    path = folder / MASK_EMBEDDING
    if not path.is_file():
        return {}
    spec = config.spec
    vector = read_mask_embedding(path, mask_token_id=spec.mask_token_id)
    if vector.shape != (spec.n_embd,):
        raise FileError(f"{path}: a vector of {vector.size}, expected hidden_size {spec.n_embd}")
    found: Origins = {}
    plan, origin = _own(config, weights) or _of_target(config, target, _EMBEDDINGS)
    found[_EMBEDDINGS] = plan, ReplacedRow(origin, spec.mask_token_id, vector)
    if not any(name in weights.tensors for name in ("lm_head.weight", "model.lm_head.weight")):
        found[_HEAD] = _of_target(config, target, _HEAD)
    return found


def _own(config: DraftConfig, weights: Checkpoint) -> tuple[TensorPlan, RowSource] | None:
    for source in ("embed_tokens.weight", "model.embed_tokens.weight"):
        if source in weights.tensors:
            shape = tuple(reversed(weights.tensors[source].shape))
            return _plan(config, _EMBEDDINGS, source, shape), weights
    return None


def _of_target(config: DraftConfig, target: GgufFile, name: str) -> tuple[TensorPlan, RowSource]:
    if not target.shards:
        raise InputError(
            f"{MASK_EMBEDDING} replaces a row of the target's embeddings, and only the header of"
            f" {target.path} was read; give a GGUF file of the target that is on this disk"
        )
    # a target without an output head uses its embeddings
    stored = name if name in target.tensors else _EMBEDDINGS
    plan = _plan(config, name, stored, target.tensors[stored].shape)
    return plan, target


def _plan(config: DraftConfig, name: str, source: str, shape: tuple[int, ...]) -> TensorPlan:
    expected = config.spec.n_embd, config.spec.n_vocab
    if shape != expected:
        raise FileError(
            f"tensor {source!r} has the shape {list(reversed(shape))}, expected"
            f" {list(expected[::-1])} from the drafter's config.json"
        )
    return TensorPlan(name, source, shape)
