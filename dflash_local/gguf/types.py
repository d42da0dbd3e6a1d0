"""The value and tensor types of GGUF versions 2 and 3, little-endian."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES

# ggml/include/gguf.h, enum gguf_type: number -> (name, numpy dtype of one value)
SCALAR_TYPES: dict[int, tuple[str, np.dtype[np.generic]]] = {
    0: ("uint8", np.dtype("<u1")),
    1: ("int8", np.dtype("<i1")),
    2: ("uint16", np.dtype("<u2")),
    3: ("int16", np.dtype("<i2")),
    4: ("uint32", np.dtype("<u4")),
    5: ("int32", np.dtype("<i4")),
    6: ("float32", np.dtype("<f4")),
    7: ("bool", np.dtype("<u1")),
    10: ("uint64", np.dtype("<u8")),
    11: ("int64", np.dtype("<i8")),
    12: ("float64", np.dtype("<f8")),
}
BOOL, STRING, ARRAY = 7, 8, 9


@dataclass(frozen=True)
class TensorType:
    """A ggml type: `block` values of a row are stored in `bytes` bytes."""

    name: str
    block: int
    bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    int(kind): TensorType(kind.name, block, size)
    for kind, (block, size) in GGML_QUANT_SIZES.items()
}
# llama.cpp reads this type, the gguf package of the same time does not know it
TENSOR_TYPES.setdefault(42, TensorType("Q2_0", 64, 18))


def known_tensor_types() -> str:
    """The type numbers with their names, for messages."""
    return ", ".join(f"{number} {kind.name}" for number, kind in sorted(TENSOR_TYPES.items()))
