"""The header that a GGUF file will have, to be checked before and compared after it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from dflash_local.gguf.file import GgufFile, TensorInfo
from dflash_local.gguf.header import TENSOR_TYPES

from .key import Key
from .quantize import n_bytes
from .tensors import TensorPlan

Tensors = Sequence[tuple[TensorPlan, GGMLQuantizationType]]

_VERSION = 3


def planned_file(path: Path, keys: Sequence[Key], tensors: Tensors) -> GgufFile:
    """The file at `path` as it will be; offsets of tensors are counted from 0."""
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for plan, kind in tensors:
        size = n_bytes(plan.shape, kind)
        name = TENSOR_TYPES[int(kind)].name
        infos[plan.name] = TensorInfo(plan.name, plan.shape, int(kind), name, offset, size)
        offset += size
    return GgufFile(
        path,
        _VERSION,
        {key.name: _stored(key) for key in keys},
        {key.name: key.type_name for key in keys},
        infos,
        offset,
        (path,),
    )


def difference(planned: GgufFile, written: GgufFile) -> str:
    """What differs first, in words; empty when `written` is what was planned."""
    for what, ours, theirs in (
        ("type of key", planned.value_types, written.value_types),
        ("key", planned.metadata, written.metadata),
        ("tensor", _shapes(planned), _shapes(written)),
    ):
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                return f"{what} {name!r}"
    return ""


def _shapes(file: GgufFile) -> dict[str, tuple[tuple[int, ...], int, int]]:
    return {name: (info.shape, info.type, info.n_bytes) for name, info in file.tensors.items()}


def _stored(key: Key) -> Any:
    """The value as it will be read back."""
    if isinstance(key.value, Sequence) and not isinstance(key.value, str):
        single = key.kind == "arr_f32"
        return [float(np.float32(item)) if single else item for item in key.value]
    return float(np.float32(key.value)) if key.kind == "f32" else key.value
