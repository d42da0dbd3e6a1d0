"""The weights of a Hugging Face checkpoint: safetensors, in one file or several, read in pieces."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .reading import fail, read_json, regular_size, shown, told, unreadable

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_INDEX_LIMIT = 25_000_000  # bytes
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor. `shape` is in the checkpoint's order, the extent of a row last."""

    name: str
    dtype: str
    """As the file names it: "F32", "F16", "BF16", "I64", ..."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """First byte, counted from the start of the file."""
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """The product of `shape`; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder. Only the bytes that are asked for are read."""

    folder: Path
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    paths: tuple[Path, ...]
    """The safetensors files, in the order of their names."""

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read and check the headers of the checkpoint in `folder`. Raises FileError: no
        safetensors, a shard missing, a malformed header."""
        folder = Path(folder)
        paths = tuple(folder / name for name in _files_of(folder))
        return cls(folder, dict(ChainMap(*map(_read_entries, paths))), paths)

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` along the first dimension, [stop - start, ...] in float32.

        The rows of a vector are its elements, and a scalar is a vector of one. Raises FileError
        when there is no such tensor, when its dtype is not F32, F16 or BF16, or on a failed read.
        """
        entry = self._entry(name)
        shape = entry.shape or (1,)
        if not 0 <= start <= stop <= shape[0]:
            raise IndexError(f"rows {start} to {stop} of {shape[0]} of tensor {shown(name)}")
        per_row = entry.n_elements // shape[0] if shape[0] else 0
        span = (start * per_row, stop * per_row)
        stored = _read(entry, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}, span)
        if entry.dtype == "BF16":
            # the upper half of a float32
            wide = stored.astype(np.uint32)
            wide <<= 16
            stored = wide.view(np.float32)
        return stored.astype(np.float32, copy=False).reshape(stop - start, *shape[1:])

    def integers(self, name: str) -> NDArray[np.int64]:
        """The whole of an I64 or I32 tensor, in its shape. Raises FileError as `rows` does."""
        entry = self._entry(name)
        stored = _read(entry, {"I64": "<i8", "I32": "<i4"}, (0, entry.n_elements))
        return stored.astype(np.int64, copy=False).reshape(entry.shape)

    def sha256(self) -> str:
        """Of the bytes of all safetensors files, one after the other in the order of `paths`."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    while chunk := file.read(_CHUNK):
                        digest.update(chunk)
            except OSError as error:
                raise unreadable(path, error) from None
        return digest.hexdigest()

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            fail(self.folder, f"holds no tensor {shown(name)}")
        return self.tensors[name]


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, from a model.safetensors.index.json. Raises FileError."""
    weight_map = read_json(path, _INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        fail(path, "holds no weight_map, expected one from tensor names to file names")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            fail(path, f"weight_map names {shown(name)}, expected a safetensors file beside it")
    return weight_map


def _files_of(folder: Path) -> list[str]:
    """The files that make up the checkpoint, by name."""
    try:
        present = sorted(os.listdir(folder))
    except FileNotFoundError:
        fail(folder, "no such folder")
    except NotADirectoryError:
        fail(folder, "a file, expected the folder that holds the checkpoint")
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from None
    files = [name for name in present if name.endswith(".safetensors")]
    index = read_index(folder / INDEX_NAME) if INDEX_NAME in present else None
    # as in transformers, one whole file comes before an index of others
    if SINGLE_NAME in files and (index is None or SINGLE_NAME not in index.values()):
        return [SINGLE_NAME]
    if index is None:
        return [_only(folder, files, present)]
    names = sorted(set(index.values()))
    if missing := [name for name in names if name not in present]:
        some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        fail(folder, f"{len(missing)} of {len(names)} safetensors files are missing: {some}")
    return names


def _only(folder: Path, files: list[str], present: list[str]) -> str:
    if len(files) == 1:
        return files[0]
    if files:
        fail(folder, f"which of {', '.join(files[:4])} make the model? {INDEX_NAME} is missing")
    pickles = [name for name in present if name.endswith(_PICKLES)]
    if pickles:
        fail(
            folder,
            f"holds no safetensors; {pickles[0]} is a pickle, which may run code and is not"
            " read: save the model with safe_serialization=True",
        )
    fail(folder, "holds no safetensors file, expected model.safetensors or its shards")


def _read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors file at `path`. Raises FileError for a malformed one.

    Each tensor has as many bytes as its dtype and shape say, and together they fill the file. The
    safetensors package checks that, but tells no places, and gives no BF16 without PyTorch.
    """
    regular_size(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if prefix == b"version ":
                fail(path, "a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            with safe_open(path, framework="np"):
                start = 8 + int.from_bytes(prefix, "little")
                header = json.loads(file.read(start - 8))
    except SafetensorError as error:
        fail(path, f"no safetensors file, or a damaged one: {told(error)}; fetch it again")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    header.pop("__metadata__", None)
    return {
        name: TensorEntry(name, raw["dtype"], tuple(raw["shape"]), path, start + begin, end - begin)
        for name, raw in header.items()
        for begin, end in [raw["data_offsets"]]
    }


def _read(
    entry: TensorEntry, dtypes: Mapping[str, str], span: tuple[int, int]
) -> NDArray[np.generic]:
    """Elements `span[0]` to `span[1]`, as stored. `dtypes`: those that are supported, in numpy."""
    if entry.dtype not in dtypes:
        *others, last = dtypes
        fail(
            entry.path,
            f"tensor {shown(entry.name)}: dtype {entry.dtype} is not supported here,"
            f" expected {', '.join(others)} or {last}",
        )
    stored = np.dtype(dtypes[entry.dtype])
    # not by mmap, whose pages would count as this process's memory
    values = np.empty(span[1] - span[0], stored)
    room = values.view(np.uint8).data
    done = 0
    try:
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset + span[0] * stored.itemsize)
            while done < len(room):
                count = file.readinto(room[done:])
                if not count:
                    size = regular_size(entry.path)
                    fail(entry.path, f"became shorter while it was read, now {size} bytes")
                done += count
    except OSError as error:
        raise unreadable(entry.path, error) from None
    return values
