"""LoRA adapters and control vectors of random numbers, and targets with an adapter merged in."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from gguf_files import FLOAT32, STRING, Tensor, Value, changed, keys_of, parts, write

F32 = gguf.GGMLQuantizationType.F32
ADAPTED = ("blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight")
RANK, ALPHA = 4, 8.0


def _products(
    target: Path, names: Sequence[str], gain: float, seed: int
) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """A [rank, in] and B [out, rank] of each matrix. At a gain of 1 the product is as large as the
    random weights of a matrix usually are."""
    random = np.random.default_rng(seed)
    _, tensors = parts(target)
    found = {}
    for name in names:
        data, kind = tensors[name]
        n_out, n_in = gguf.quants.dequantize(data, kind).shape
        a = random.standard_normal((RANK, n_in)) / np.sqrt(n_in)
        b = random.standard_normal((n_out, RANK)) / np.sqrt(RANK) * gain
        found[name] = a.astype(np.float32), b.astype(np.float32)
    return found


def write_lora(
    path: Path,
    target: Path,
    *,
    names: Sequence[str] = ADAPTED,
    gain: float = 1.0,
    seed: int = 0,
    keys: Mapping[str, Value | None] | None = None,
    tensors: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """An adapter of such matrices; `keys` and `tensors` replace what it has (None: left out)."""
    all_keys: dict[str, Value | None] = {
        "general.architecture": (keys_of(target)["general.architecture"][0], STRING, None),
        "general.type": ("adapter", STRING, None),
        "adapter.type": ("lora", STRING, None),
        "adapter.lora.alpha": (ALPHA, FLOAT32, None),
    }
    all_tensors: dict[str, Tensor | None] = {}
    for name, (a, b) in _products(target, names, gain, seed).items():
        all_tensors |= {f"{name}.lora_a": (a, F32), f"{name}.lora_b": (b, F32)}
    all_keys |= keys or {}
    all_tensors |= tensors or {}
    return write(
        path,
        {name: value for name, value in all_keys.items() if value is not None},
        {name: tensor for name, tensor in all_tensors.items() if tensor is not None},
    )


def merged(path: Path, target: Path, scale: float, *, gain: float = 1.0, seed: int = 0) -> Path:
    """A copy of a target in F32 with the weights that the adapter makes of its own."""

    def add(tensors: dict[str, Tensor]) -> None:
        for name, (a, b) in _products(target, ADAPTED, gain, seed).items():
            data, _ = tensors[name]
            tensors[name] = (data + np.float32(scale * ALPHA / RANK) * (b @ a), F32)

    return changed(target, path, tensors=add)


def write_control_vector(path: Path, directions: Mapping[int, NDArray[np.float32]]) -> Path:
    """One with a direction for each of these layers."""
    keys: dict[str, Value] = {"general.architecture": ("controlvector", STRING, None)}
    return write(path, keys, {f"direction.{i}": (v, F32) for i, v in directions.items()})
