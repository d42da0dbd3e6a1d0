"""A drafter's weights as PyTorch tensors: from its GGUF file, or from the checkpoint it was made
of; embeddings and output head from the target's file where the drafter has none."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dflash_local.gguf.file import GgufFile
from dflash_local.tune.drafter import TorchDrafter

_ENDS = ("token_embd.weight", "output.weight")
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
    reader = gguf.GGUFReader(drafter)
    keys: dict[str, Any] = {
        name.removeprefix("dflash."): value.contents()
        for name, value in reader.fields.items()
        if name.startswith("dflash.")
    }
    ends = _end_tensors(target) | {t.name: t for t in reader.tensors if t.name in _ENDS}
    own = {tensor.name for tensor in reader.tensors}
    if "token_embd.weight" in own and "output.weight" not in own:
        ends["output.weight"] = ends["token_embd.weight"]
    ends.setdefault("output.weight", ends["token_embd.weight"])
    weights = {
        tensor.name: dequantize(tensor, wide if len(tensor.shape) == 1 else dtype, device)
        for tensor in reader.tensors
        if tensor.name not in _ENDS
    }
    head = dequantize(ends["output.weight"], head_dtype or dtype, device)
    if "output.weight" in own:
        weights["output.weight"] = head
    embeddings = ends["token_embd.weight"]
    return TorchDrafter(
        keys,
        weights,
        int(reader.fields["tokenizer.ggml.mask_token_id"].contents()),
        int(embeddings.shape[1]),
        _embed(embeddings, wide, device),
        head,
        cache_dtype=cache_dtype,
    )


def dequantize(tensor: gguf.ReaderTensor, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of a GGUF file, rows first."""
    data = tensor.data
    rows = data.reshape(-1, data.shape[-1])
    step = max(1, _PIECE // int(tensor.shape[0]))
    pieces = [
        torch.from_numpy(_values(rows[i : i + step], tensor)).to(device, dtype)
        for i in range(0, len(rows), step)
    ]
    shape = [int(n) for n in reversed(tensor.shape.tolist())]
    return torch.cat(pieces).reshape(shape)


def _values(rows: NDArray[Any], tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    if tensor.tensor_type != gguf.GGMLQuantizationType.I64:
        rows = gguf.quants.dequantize(rows, tensor.tensor_type)
    return np.array(rows, dtype=np.float32)


def _embed(
    tensor: gguf.ReaderTensor, dtype: torch.dtype, device: str
) -> Callable[[Tensor], Tensor]:
    """Looks rows up in the file: a block needs two, and all of them take gigabytes. Where they do
    not, a GPU has them all and need not wait."""
    if device != "cpu" and tensor.n_elements <= _FEW_EMBEDDINGS:
        return partial(functional.embedding, weight=dequantize(tensor, dtype, device))

    def embed(tokens: Tensor) -> Tensor:
        ids, places = torch.unique(tokens, return_inverse=True)
        rows = torch.from_numpy(_values(tensor.data[ids.cpu().numpy()], tensor))
        return rows.to(device, dtype)[places]

    return embed


def _end_tensors(target: Path) -> dict[str, gguf.ReaderTensor]:
    """Token embeddings and output head of a target, which may be in several files."""
    shards = GgufFile.open(target).shards
    found = (tensor for shard in shards for tensor in gguf.GGUFReader(shard).tensors)
    return {tensor.name: tensor for tensor in found if tensor.name in _ENDS}
