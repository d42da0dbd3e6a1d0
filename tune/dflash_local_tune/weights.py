"""A drafter's weights as PyTorch tensors: from its GGUF file; embeddings and output head from the
target's file where the drafter has none."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dflash_local.gguf.file import GgufFile
from dflash_local_tune.drafter import TorchDrafter

_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"
_FEW_EMBEDDINGS = 1 << 27
_PIECE = 1 << 25
"""Values that are dequantised at once: whole tensors in float32 take gigabytes of host memory."""


def read_torch_drafter(
    drafter: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    head_dtype: torch.dtype | None = None,
    device: str = "cpu",
    cache_dtype: torch.dtype | None = None,
) -> TorchDrafter:
    """The drafter of a GGUF file, every weight dequantised on `device`: matrices to `dtype`, the
    output head to `head_dtype`, which is `dtype` by default, and vectors to float32 at least."""
    wide = dtype if dtype == torch.float64 else torch.float32
    own, shared = GgufFile.open(drafter), GgufFile.open(target)
    keys = {
        name.removeprefix("dflash."): value
        for name, value in own.metadata.items()
        if name.startswith("dflash.")
    }
    weights = {
        name: dequantize(own, name, wide if len(info.shape) == 1 else dtype, device)
        for name, info in own.tensors.items()
        if name not in (_EMBEDDINGS, _HEAD)
    }
    embeddings = own if _EMBEDDINGS in own.tensors else shared
    # A head of its own, or its embeddings, or those of the target.
    heads = [(own, _HEAD), (own, _EMBEDDINGS), (shared, _HEAD), (shared, _EMBEDDINGS)]
    place = next((file, name) for file, name in heads if name in file.tensors)
    head = dequantize(*place, head_dtype or dtype, device)
    if _HEAD in own.tensors:
        weights[_HEAD] = head
    return TorchDrafter(
        keys,
        weights,
        own.require("tokenizer.ggml.mask_token_id", int),
        embeddings.tensors[_EMBEDDINGS].shape[1],
        _embed(embeddings, wide, device),
        head,
        cache_dtype=cache_dtype,
    )


def dequantize(file: GgufFile, name: str, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of a GGUF file, rows first."""
    shape = file.tensors[name].shape
    n_rows, step = math.prod(shape[1:]), max(1, _PIECE // shape[0])
    pieces = [
        torch.from_numpy(file.rows(name, i, min(n_rows, i + step))).to(device, dtype)
        for i in range(0, n_rows, step)
    ]
    return torch.cat(pieces).reshape(shape[::-1])


def _embed(file: GgufFile, dtype: torch.dtype, device: str) -> Callable[[Tensor], Tensor]:
    """Looks rows up in the file: a block needs two, and all of them take gigabytes. Where they do
    not, a GPU has them all and need not wait."""
    info = file.tensors[_EMBEDDINGS]
    if device != "cpu" and math.prod(info.shape) <= _FEW_EMBEDDINGS:
        weight = dequantize(file, _EMBEDDINGS, dtype, device)
        return partial(functional.embedding, weight=weight)
    n, kind = info.shape[1], gguf.GGMLQuantizationType(info.type)
    path = file.shards[info.shard]
    stored = np.memmap(path, np.uint8, "r", info.offset, (n, info.n_bytes // n))

    def embed(tokens: Tensor) -> Tensor:
        ids, places = torch.unique(tokens, return_inverse=True)
        rows = gguf.quants.dequantize(stored[ids.cpu().numpy()], kind)
        return torch.from_numpy(np.array(rows, np.float32)).to(device, dtype)[places]

    return embed
