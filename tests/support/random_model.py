"""A GGUF file in the making, whose tensors are random."""

import ctypes
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from gguf_files import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Tensor, Value, write

LOGIT_STD = 2.0
"""Standard deviation, in nats, of the logits that a random output head gives."""

Weights = NDArray[np.float32]


@dataclass
class RandomModel:
    """Keys and tensors of a file. Each tensor depends only on the seed and its own name.

    `quant` names the ggml type of its matrices, `mixed` that of some by their own names. `added` is
    how much its layers add to what goes through them.
    """

    architecture: str
    quant: str
    seed: int
    mixed: Mapping[str, str] = field(default_factory=dict)
    added: float = 1.0
    keys: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys["general.architecture"] = (self.architecture, STRING, None)

    def key(self, name: str, value: bool | int | float | str | list[int] | list[bool]) -> None:
        """One of the architecture's."""
        name = f"{self.architecture}.{name}"
        if isinstance(value, list):
            self.keys[name] = (value, ARRAY, BOOL if isinstance(value[0], bool) else INT32)
        else:
            kinds = {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}
            self.keys[name] = (value, kinds[type(value)], None)

    def numbers(self, **numbers: int | float | list[int]) -> None:
        """Keys with a dot for each `__`."""
        for name, value in numbers.items():
            self.key(name.replace("__", "."), value)

    def normal(self, name: str, *shape: int) -> Weights:
        return self._generator(name).standard_normal(shape, dtype=np.float32)

    def uniform(self, name: str, *shape: int) -> Weights:
        return self._generator(name).random(shape, dtype=np.float32)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """The last dimension is that of the input."""
        if any(part in name for part in ("attn_output", "ssm_out", "ffn_down")):
            gain *= self.added
        self.packed(name, self.normal(name, *shape) * np.float32(gain / np.sqrt(shape[-1])))

    def packed(self, name: str, values: Weights) -> None:
        """A matrix of these values."""
        shape = values.shape
        kind = GGMLQuantizationType[self.mixed.get(name, self.quant)]
        packed = quantize(values.reshape(-1, shape[-1]), kind)
        self.tensors[name] = packed.reshape(*shape[:-1], -1), kind

    def plain(self, name: str, values: Any) -> None:
        f32 = GGMLQuantizationType.F32
        self.tensors[name] = np.ascontiguousarray(values, np.float32), f32

    def norm(self, name: str, *shape: int, mean: float = 1.0) -> None:
        self.plain(name, mean + 0.2 * self.normal(name, *shape))

    def write(self, path: str | Path) -> Path:
        """With a time that tells nothing: results kept for a file hold for one written again."""
        written = write(Path(path), self.keys, self.tensors)
        os.utime(written, (1e9, 1e9))
        return written

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])


def quantize(values: Weights, kind: GGMLQuantizationType) -> NDArray[Any]:
    """`values` (rows, columns) in a ggml type; by ggml itself where `gguf` only reads the type."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = values.shape[1]
    if columns % block:
        raise ValueError(f"rows of {columns} do not divide into {kind.name} blocks of {block}")
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return _quantize_in_ggml(values, kind, columns // block * n_bytes)


def _quantize_in_ggml(
    values: Weights, kind: GGMLQuantizationType, bytes_per_row: int
) -> NDArray[np.uint8]:
    from llama_cpp._ggml import libggml

    chunk = libggml.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
    rows, columns = values.shape
    source = np.ascontiguousarray(values, dtype=np.float32)
    packed = np.empty((rows, bytes_per_row), dtype=np.uint8)
    written = chunk(int(kind), source.ctypes.data, packed.ctypes.data, 0, rows, columns, None)
    if written != packed.nbytes:
        raise RuntimeError(f"ggml wrote {written} bytes of {kind.name}, not {packed.nbytes}")
    return packed
