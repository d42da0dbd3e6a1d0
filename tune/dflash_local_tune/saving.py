"""A tuned drafter's files: safetensors, and a GGUF file with the keys and types of the old one."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_local.convert.checks import check_written, planned_file
from dflash_local.convert.conversion import SHA256, SOURCE, tensor_plans
from dflash_local.convert.files.checkpoint import SINGLE_NAME, Checkpoint
from dflash_local.convert.key import Key
from dflash_local.convert.tensors.plan import TensorPlan, interleaved
from dflash_local.convert.writer import write_gguf
from dflash_local.gguf.drafter_tensors import D2T
from dflash_local.gguf.file import GgufFile
from dflash_local.hub.repository import repository_of

TUNED = "dflash_local.tuned"
"""The key by which a file says that it was tuned, and for which target."""


def save_gguf(path: Path, old: GgufFile, weights: Mapping[str, Tensor], target: GgufFile) -> None:
    """Write `weights`, by the tensors' names, as a file like `old` in all else. It is checked
    before it appears. Raises InputError if it cannot be written."""
    keys = [
        Key.copied(old, name)
        for name in old.metadata
        if name not in (SHA256, TUNED, "general.alignment")
    ]
    source = repository_of(old.path)
    if SOURCE not in old.metadata and source is not None:  # the new place does not say it
        keys.append(Key.of(SOURCE, source))
    keys.append(Key.of(TUNED, f"for {target.path.name}"))
    tensors = [
        (TensorPlan(info.name, "", info.shape), GGMLQuantizationType(info.type))
        for info in old.tensors.values()
    ]

    def rows(plan: TensorPlan, start: int, stop: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = weights[plan.name].reshape(-1, plan.shape[0]).numpy()
        return values[start:stop]

    planned = planned_file(path, keys, tensors)

    def check(part: Path) -> None:
        check_written(part, planned, target)

    write_gguf(path, keys, tensors, rows, force=True, check=check)


def save_checkpoint(
    folder: Path, old: Path, weights: Mapping[str, Tensor], trained: set[str], target: Path
) -> None:
    """A checkpoint like the one in the folder `old`, with the `trained` ones of `weights`: the
    converter takes it as it takes the old one."""
    tensors: dict[str, Tensor] = {}
    for path in Checkpoint.open(old).paths:
        tensors |= load_file(path)
    for plan in tensor_plans(old, target):
        if plan.name in trained and plan.source in tensors:
            like = tensors[plan.source]
            tensors[plan.source] = _as_stored(plan, weights[plan.name], like)
    part = folder / f"{SINGLE_NAME}.new"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / SINGLE_NAME)
    for path in sorted(old.glob("*.json")):
        if not path.name.endswith(".index.json"):
            (folder / path.name).write_bytes(path.read_bytes())


def checkpoint_weights(folder: Path, target: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint by their names in the GGUF file, float32, as torch has them."""
    checkpoint = Checkpoint.open(folder)
    found: dict[str, Tensor] = {}
    for plan in tensor_plans(folder, target):
        if plan.source in checkpoint.tensors and plan.name != D2T:
            entry = checkpoint.tensors[plan.source]
            shape = entry.shape or (1,)
            values = torch.from_numpy(checkpoint.rows(plan.source, 0, shape[0]).copy())
            if plan.permute_heads:
                order = torch.from_numpy(interleaved(plan))
                values = values[order]
            found[plan.name] = values.reshape(tuple(reversed(plan.shape)))
    return found


def _as_stored(plan: TensorPlan, value: Tensor, like: Tensor) -> Tensor:
    """In the shape, type and order of rows of the checkpoint."""
    if plan.permute_heads:
        back = torch.empty_like(value)
        back[torch.from_numpy(interleaved(plan))] = value
        value = back
    return value.reshape(like.shape).to(like.dtype).contiguous()
