"""A GGUF model on disk, checked before llama.cpp sees it. Only headers are read, not weights."""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType, quants
from numpy.typing import NDArray

from dflash_local.errors import FileError
from dflash_local.gguf.header import Header, TensorInfo, read_header
from dflash_local.gguf.vocabulary import vocabulary_fault

T = TypeVar("T", bool, int, float, str, "list[Any]")

_SHARD_NAME = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$")
_KEY_PARTS, _KEY_BYTES = 16, 1 << 16
_KIND_NAMES = {bool: "bool", int: "an integer", float: "float", str: "string", list: "an array"}


@dataclass(frozen=True)
class GgufFile:
    """A readable, well-formed GGUF model, in one file or in several shards.

    Well-formed: every count, length, type, shape and offset fits the file, names are unique, and
    llama.cpp does not abort on the vocabulary, if there is one.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    """Values from the first shard: integers, floats, bools, strings, and lists of these."""
    value_types: dict[str, str]
    """The stored type of each key, such as "uint32" or "array of string"."""
    tensors: dict[str, TensorInfo]
    n_bytes: int
    """Size on disk, of all shards together."""
    shards: tuple[Path, ...] = field(default=())

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Read and check the model at `path`. Raises FileError, whatever the bytes are."""
        first = Path(path)
        header, n_bytes = _read(first, 0)
        parts = [(first, header, n_bytes)]
        n_shards = _split_key(first, header, "split.count", default=1)
        if n_shards > 1:
            for index, shard in enumerate(_shard_paths(first, header, n_shards)[1:], start=1):
                part, part_bytes = _read(shard, index)
                number = _split_key(shard, part, "split.no")
                if number != index:
                    raise FileError(f"{shard}: split.no is {number}, expected {index}")
                parts.append((shard, part, part_bytes))
        whole = cls._joined(parts)
        n_tensors = whole.get("split.tensors.count")
        if n_shards > 1 and n_tensors != len(whole.tensors):
            found = f"{_short(n_tensors)}, the shards hold {len(whole.tensors)}"
            raise FileError(f"{first}: split.tensors.count is {found}")
        fault = vocabulary_fault(whole.metadata, whole.value_types)
        if fault:
            raise FileError(f"{first}: {fault}")
        return whole

    @classmethod
    def read(cls, shards: Sequence[tuple[Path, BinaryIO, int]]) -> GgufFile:
        """A model that need not be on this disk: for each shard its name, an open file that gives
        the beginning, and its size. Only the headers are read, and the vocabulary is not checked,
        as nothing can be loaded from it. Raises FileError."""
        return cls._joined(
            [
                (name, read_header(file, str(name), size, index), size)
                for index, (name, file, size) in enumerate(shards)
            ]
        )

    @classmethod
    def _joined(cls, parts: Sequence[tuple[Path, Header, int]]) -> GgufFile:
        """The whole of shards, given with their sizes."""
        tensors: dict[str, TensorInfo] = {}
        for shard, header, _ in parts:
            for name in header.tensors.keys() & tensors.keys():
                raise FileError(f"{shard}: tensor '{name}' also occurs in another shard")
            tensors |= header.tensors
        path, first, _ = parts[0]
        return cls(
            path,
            first.version,
            first.metadata,
            first.value_types,
            tensors,
            sum(n_bytes for _, _, n_bytes in parts),
            tuple(shard for shard, _, _ in parts),
        )

    @property
    def name(self) -> str:
        """The file's name; of a file that ollama has named by its sha256, the model's."""
        name = self.path.name
        return str(self.get("general.name", name)) if name.startswith("sha256-") else name

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises FileError when missing."""
        return self.require("general.architecture", str)

    @property
    def n_vocab(self) -> int | None:
        """Number of tokens, from the vocabulary, else from a key or the embeddings, else None."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and tokens:
            return len(tokens)
        size = self.metadata.get(f"{self.metadata.get('general.architecture')}.vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
        embeddings = self.tensors.get("token_embd.weight")
        return embeddings.shape[1] if embeddings and len(embeddings.shape) == 2 else None

    @property
    def quantization(self) -> str | None:
        """The file's own name for its mixture of types, such as Q4_K_M; None if it has none."""
        try:
            name = LlamaFileType(self.get("general.file_type")).name
        except ValueError:
            return None
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`. Raises FileError when missing, of another type, or not finite."""
        if key not in self.metadata:
            self.fail(f"key '{key}' is missing, expected {_KIND_NAMES[kind]}")
        value = self.metadata[key]
        if type(value) is not kind:
            found = self.value_types[key]
            self.fail(f"key '{key}' is {found} ({_short(value)}), expected {_KIND_NAMES[kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(f"key '{key}' is {value}, expected a finite number")
        return value

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """`default` if `key` is missing, else as `require`."""
        return self.require(key, kind) if key in self.metadata else default

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` as it is stored, or `default`."""
        return self.metadata.get(key, default)

    def largest(self, name: str) -> int:
        """A size of the architecture, the largest where layers differ; 0 if it is missing."""
        value = self.get(f"{self.architecture}.{name}") or 0
        return int(max(value)) if isinstance(value, list) else int(value)

    def data(self, tensor: TensorInfo, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of the data of `tensor`. Raises FileError."""
        path = self.shards[tensor.shard]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(tensor.offset + start)
                found = file.read(stop - start)
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
        if len(found) < stop - start:
            raise FileError(f"{path}: became shorter while it was read")
        return found

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` of a tensor, [stop - start, length of a row]. Only their bytes are
        read. Raises FileError, also for a type that cannot be dequantised here."""
        tensor = self.tensors[name]
        size = tensor.n_bytes * tensor.shape[0] // math.prod(tensor.shape)
        stored = np.frombuffer(self.data(tensor, start * size, stop * size), np.uint8)
        stored = stored.reshape(stop - start, size)
        if tensor.type_name == "I64":
            return stored.view("<i8").astype(np.float32)
        try:
            values = quants.dequantize(stored, GGMLQuantizationType(tensor.type))
        except (NotImplementedError, ValueError):
            self.fail(f"tensor {name!r} is in {tensor.type_name}, which cannot be read here")
        return np.array(values, np.float32)

    def fail(self, message: str) -> NoReturn:
        raise FileError(f"{self.path}: {message}")


def _read(path: Path, shard: int) -> tuple[Header, int]:
    try:
        # checked first, as opening a pipe would block
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise FileError(f"{path}: a folder, expected a GGUF file")
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{path}: not a regular file, expected a GGUF file")
        with path.open("rb") as file:
            return read_header(file, str(path), status.st_size, shard), status.st_size
    except FileNotFoundError:
        raise FileError(f"{path}: no such file, expected a GGUF model") from None
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{path}: cannot be read: {reason}") from None


def _split_key(path: Path, header: Header, key: str, default: int | None = None) -> int:
    # llama.cpp aborts when a shard stores these as another type
    if key not in header.metadata and default is not None:
        return default
    found = header.value_types.get(key, "missing")
    if found != "uint16":
        raise FileError(f"{path}: key '{key}' is {found}, expected uint16")
    return int(header.metadata[key])


def _shard_paths(first: Path, header: Header, n_shards: int) -> tuple[Path, ...]:
    number = _split_key(first, header, "split.no")
    match = _SHARD_NAME.match(first.name)
    if match is None or int(match[2]) != number + 1 or int(match[3]) != n_shards:
        expected = f"<name>-{number + 1:05d}-of-{n_shards:05d}.gguf"
        raise FileError(f"{first}: shard {number + 1} of {n_shards} must be named {expected}")
    shards = tuple(
        first.with_name(f"{match[1]}-{index + 1:05d}-of-{n_shards:05d}.gguf")
        for index in range(n_shards)
    )
    if number != 0:
        raise FileError(f"{first}: shard {number + 1} of {n_shards}; give the first, {shards[0]}")
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise FileError(
            f"{first}: {len(missing)} of {n_shards} shards are missing beside it: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
        )
    return shards


def shard_files(path: Path) -> tuple[Path, ...]:
    """The files beside `path` that belong to the same model by their names, `path` included."""
    match = _SHARD_NAME.match(path.name)
    if match is None:
        return (path,)
    names = [f"{match[1]}-{index:05d}-of-{match[3]}.gguf" for index in range(1, int(match[3]) + 1)]
    return tuple(path.with_name(name) for name in names if path.with_name(name).exists())


def file_key(path: Path) -> list[list[Any]]:
    """Identifies a model's files, also after they were moved.

    It has, for each shard, its size, the time of its last change and a digest of parts spread over
    it: models are too large to be read as a whole. Raises FileError.
    """
    return [_one_file_key(shard) for shard in shard_files(path)]


def _one_file_key(path: Path) -> list[Any]:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            for i in range(_KEY_PARTS):
                file.seek(max(0, status.st_size - _KEY_BYTES) * i // (_KEY_PARTS - 1))
                digest.update(file.read(_KEY_BYTES))
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} values"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
