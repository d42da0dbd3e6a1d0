"""Reads a GGUF header with limits: every count and length in it is checked before it is used.

llama.cpp aborts the process on some malformed files, so every file is read here first. The rules
are those of `ggml/src/gguf.cpp`. If that reader accepts more than its own data structures can
hold, this one has its own limit.
"""

import math
import struct
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES

from dflash_local.errors import FileError

MAX_HEADER_BYTES = 1 << 27
MAX_ARRAY_VALUES = 1 << 22  # of all arrays together; the largest vocabularies need 1.3 million
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 63  # GGML_MAX_NAME less the end mark
DEFAULT_ALIGNMENT = 32
# ggml's CPU buffers begin at a multiple of this, and mapped files are used as they are
BUFFER_ALIGNMENT = 32

_FIRST_READ = 1 << 20
_LONGEST_MESSAGE = 1000
_LENGTH = struct.Struct("<Q")


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


# name, values of a block, and bytes that these take
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()
}
# llama.cpp reads this type, but the gguf package does not know it yet
_TENSOR_TYPES.setdefault(42, ("Q2_0", 64, 18))


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place in its file. `shape` is in ggml's order, the length of a row first."""

    name: str
    shape: tuple[int, ...]
    type: int
    type_name: str
    offset: int
    """Position of the first byte in its file."""
    n_bytes: int
    shard: int = 0
    """Index into `GgufFile.shards`."""


@dataclass(frozen=True)
class Header:
    """Everything before the tensor data of one file."""

    version: int
    metadata: dict[str, Any]
    value_types: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(file: BinaryIO, path: str, n_bytes: int, shard: int) -> Header:
    """The checked header of an open file of `n_bytes`. Raises FileError, or OSError as `read`."""
    return _HeaderReader(file, path, n_bytes).header(shard)


class _HeaderReader:
    def __init__(self, file: BinaryIO, path: str, n_bytes: int) -> None:
        self._file = file
        self._path = path
        self._n_bytes = n_bytes
        self._buffer = b""
        self._pos = 0
        self._array_values = 0

    def header(self, shard: int) -> Header:
        version = self._magic_and_version()
        n_tensors = self._count("tensors", MAX_TENSORS, at_least_bytes=25)
        n_keys = self._count("keys", MAX_KEYS, at_least_bytes=13)
        metadata: dict[str, Any] = {}
        value_types: dict[str, str] = {}
        for index in range(n_keys):
            key = self._name(f"key {index}", MAX_KEY_BYTES)
            if key in metadata:
                self._fail(f"key {key!r} occurs twice")
            metadata[key], value_types[key] = self._value(key)
        alignment = self._alignment(metadata, value_types)
        tensors = [self._tensor(index) for index in range(n_tensors)]
        data_start = _padded(self._pos, alignment) if tensors else self._pos
        if tensors and data_start % BUFFER_ALIGNMENT:
            self._fail(
                f"general.alignment {alignment} lets the tensor data begin at byte {data_start}, "
                f"and llama.cpp needs a multiple of {BUFFER_ALIGNMENT}; convert the model again"
            )
        self._check_layout(tensors, data_start, alignment)
        placed = {
            tensor.name: replace(tensor, offset=data_start + tensor.offset, shard=shard)
            for tensor in tensors
        }
        return Header(version, metadata, value_types, placed)

    def _magic_and_version(self) -> int:
        if self._n_bytes == 0:
            self._fail("the file is empty, expected a GGUF model")
        start = self._take(min(self._n_bytes, 24), "the header")
        if not start.startswith(b"GGUF"):
            hint = "expected a GGUF model"
            if start.startswith(b"version https://git-lfs"):
                hint = "it is a Git LFS pointer; fetch the file itself with `git lfs pull`"
            self._fail(f"not a GGUF file: it starts with {start[:4]!r}; {hint}")
        if len(start) < 24:
            self._fail(f"truncated: {self._n_bytes} bytes, and the header alone takes 24")
        self._pos = 8
        version = int.from_bytes(start[4:8], "little")
        if version & 0xFFFF == 0 and version:
            self._fail("a big-endian GGUF file; convert it with `gguf-convert-endian ... little`")
        if version not in (2, 3):
            self._fail(f"GGUF version {version}, expected 2 or 3; convert the model again")
        return version

    def _count(self, what: str, limit: int, *, at_least_bytes: int) -> int:
        count = self._length(f"the number of {what}")
        if count > limit or count * at_least_bytes > self._n_bytes:
            self._fail(f"claims {count} {what}, more than {self._n_bytes} bytes can hold")
        return count

    def _value(self, key: str) -> tuple[Any, str]:
        kind = self._int32(f"the type of key {key!r}")
        if kind == STRING:
            return self._string(f"the value of key {key!r}"), "string"
        if kind in SCALAR_TYPES:
            return self._scalars(key, kind, 1)[0], SCALAR_TYPES[kind][0]
        if kind != ARRAY:
            self._fail(f"key {key!r} has the unknown value type {kind}, expected 0 to 12")
        element = self._int32(f"the element type of key {key!r}")
        if element == ARRAY:
            self._fail(f"key {key!r} is an array of arrays, which llama.cpp does not read")
        if element != STRING and element not in SCALAR_TYPES:
            self._fail(f"key {key!r} has the unknown element type {element}, expected 0 to 12")
        size = 8 if element == STRING else SCALAR_TYPES[element][1].itemsize
        count = self._length(f"the length of key {key!r}")
        self._array_values += count
        if count * size > self._n_bytes - self._pos or self._array_values > MAX_ARRAY_VALUES:
            self._fail(
                f"key {key!r} claims {count} values; {self._n_bytes - self._pos} bytes of the file "
                f"remain, and {MAX_ARRAY_VALUES} values are allowed in all"
            )
        if element == STRING:
            return self._strings(key, count), "array of string"
        return self._scalars(key, element, count), f"array of {SCALAR_TYPES[element][0]}"

    def _scalars(self, key: str, kind: int, count: int) -> list[Any]:
        dtype = SCALAR_TYPES[kind][1]
        raw = self._take(count * dtype.itemsize, f"the value of key {key!r}")
        values: list[Any] = np.frombuffer(raw, dtype=dtype).tolist()
        if kind == BOOL:
            if any(value > 1 for value in values):
                self._fail(f"key {key!r} is bool with a byte other than 0 and 1")
            return [bool(value) for value in values]
        return values

    def _strings(self, key: str, count: int) -> list[str]:
        # locals and no method calls: there may be hundreds of thousands of strings
        unpack, pos, buffer = _LENGTH.unpack_from, self._pos, self._buffer
        values: list[str] = []
        append = values.append
        what = f"the strings of key {key!r}"
        for _ in range(count):
            if pos + 8 > len(buffer):
                buffer = self._filled(pos + 8, what)
            end = pos + 8 + unpack(buffer, pos)[0]
            if end > len(buffer):
                buffer = self._filled(end, what)
            append(buffer[pos + 8 : end].decode("utf-8", "surrogateescape"))
            pos = end
        self._pos = pos
        return values

    def _alignment(self, metadata: dict[str, Any], value_types: dict[str, str]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        kind = value_types.get("general.alignment", "uint32")
        if kind != "uint32":
            self._fail(f"key 'general.alignment' is {kind}, expected uint32")
        assert isinstance(alignment, int)
        if alignment < 8 or alignment & (alignment - 1) or alignment > MAX_HEADER_BYTES:
            self._fail(f"general.alignment is {alignment}, expected a power of two from 8 on")
        return alignment

    def _tensor(self, index: int) -> TensorInfo:
        """Its offset counts from the start of the data."""
        name = self._name(f"the name of tensor {index}", MAX_NAME_BYTES)
        if "\0" in name:
            self._fail(f"the name of tensor {index} holds a zero byte: {name!r}")
        n_dims = int.from_bytes(self._take(4, f"the dimensions of tensor {name!r}"), "little")
        if not 1 <= n_dims <= MAX_DIMS:
            self._fail(f"tensor {name!r} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
        what = f"the shape of tensor {name!r}"
        shape = tuple(self._length(what) for _ in range(n_dims))
        n_values = math.prod(shape)
        if min(shape) < 1 or n_values >= 1 << 63:
            self._fail(f"tensor {name!r} has the shape {list(shape)}, expected positive extents")
        type_number = self._int32(f"the type of tensor {name!r}")
        if type_number not in _TENSOR_TYPES:
            known = ", ".join(f"{number} {kind[0]}" for number, kind in _TENSOR_TYPES.items())
            self._fail(f"tensor {name!r} has the type number {type_number}, known are {known}")
        kind, block, block_bytes = _TENSOR_TYPES[type_number]
        if shape[0] % block:
            self._fail(
                f"tensor {name!r} has rows of {shape[0]} values, and its type {kind} "
                f"stores blocks of {block}"
            )
        offset = self._length(f"the offset of tensor {name!r}")
        n_bytes = n_values // block * block_bytes
        return TensorInfo(name, shape, type_number, kind, offset, n_bytes)

    def _check_layout(self, tensors: list[TensorInfo], data_start: int, alignment: int) -> None:
        room = self._n_bytes - data_start
        told = f"it has {max(room, 0)} bytes of tensor data"
        names: set[str] = set()
        expected, end, before = 0, 0, ""
        for tensor in tensors:
            if tensor.name in names:
                self._fail(f"tensor {tensor.name!r} occurs twice")
            names.add(tensor.name)
            where = f"tensor {tensor.name!r} at offset {tensor.offset}"
            if tensor.offset != expected and tensor.offset + tensor.n_bytes > room:
                self._fail(f"{where} with {tensor.n_bytes} bytes leaves the file: {told}")
            if tensor.offset % alignment:
                self._fail(f"{where} is not aligned to {alignment} bytes")
            if tensor.offset < expected:
                leaves = f" and leaves the file: {told}" if end > room else ""
                self._fail(f"{where} overlaps {before!r}, which ends at {end}{leaves}")
            if tensor.offset > expected:
                self._fail(f"{where} leaves a gap: expected offset {expected}")
            end = tensor.offset + tensor.n_bytes
            expected, before = _padded(end, alignment), tensor.name
        if end > room:
            self._fail(
                f"truncated: {self._n_bytes} bytes, its tensors need {data_start + end}, so "
                f"{end - room} bytes are missing; download or convert it again"
            )

    def _name(self, what: str, limit: int) -> str:
        length = self._length(f"the length of {what}")
        if not 1 <= length <= limit:
            self._fail(
                f"the header is damaged: {what} would be {length} bytes long, expected 1 to "
                f"{limit}; download or convert it again"
            )
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8: {raw[:64]!r}")

    def _string(self, what: str) -> str:
        length = self._length(f"the length of {what}")
        return self._take(length, what).decode("utf-8", "surrogateescape")

    def _int32(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little", signed=True)

    def _length(self, what: str) -> int:
        return int.from_bytes(self._take(8, what), "little")

    def _take(self, count: int, what: str) -> bytes:
        end = self._pos + count
        buffer = self._buffer if end <= len(self._buffer) else self._filled(end, what)
        taken = buffer[self._pos : end]
        self._pos = end
        return taken

    def _filled(self, end: int, what: str) -> bytes:
        """The buffer, extended to byte `end` of the file."""
        if end > self._n_bytes:
            self._fail(
                f"truncated or malformed: {what} would end at byte {end}, "
                f"the file has {self._n_bytes}"
            )
        if end > MAX_HEADER_BYTES:
            self._fail(f"{what} ends at byte {end}; a header has at most {MAX_HEADER_BYTES}")
        wanted = max(end, 2 * len(self._buffer), _FIRST_READ) - len(self._buffer)
        self._buffer += self._file.read(wanted)
        if len(self._buffer) < end:
            self._fail(f"changed while it was read: only {len(self._buffer)} bytes came")
        return self._buffer

    def _fail(self, message: str) -> NoReturn:
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[:_LONGEST_MESSAGE]}..."
        raise FileError(f"{self._path}: {message}")


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
