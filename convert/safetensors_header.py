"""The header of a safetensors file, checked against the file before any of it is believed.

Layout (https://huggingface.co/docs/safetensors): the header's length as 8 little-endian bytes, the
header in JSON, the tensors' bytes without a gap to the end of the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from dflash_local.errors import FileError

HEADER_LIMIT = 25_000_000
"""Bytes. The hub refuses longer headers; a drafter's has some 20,000."""

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of an element, by dtype."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. `shape` is in the checkpoint's order, the extent of a row last."""

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


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors file at `path`. Raises FileError, whatever the bytes are.

    Every tensor's bytes are those of its dtype and shape, and together they fill the file.
    """
    text, data_start, n_data = _read_text(path)
    try:
        header = strict_json(text)
    except ValueError as error:
        fail(path, f"the safetensors header is malformed: {error}")
    if not isinstance(header, dict):
        fail(path, "the safetensors header is no JSON object")
    _check_metadata(path, header.pop("__metadata__", {}))
    entries = {name: _entry(path, name, raw, data_start) for name, raw in header.items()}
    _check_layout(path, list(entries.values()), data_start, n_data)
    return entries


def strict_json(text: bytes) -> Any:
    """`text` parsed as UTF-8 JSON. Raises ValueError; two equal keys and NaN are faults too."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in found if keys.count(key) > 1)
            raise ValueError(f"{shown(twice)} occurs twice")
        for text in (*found, *found.values()):
            if isinstance(text, str) and not _is_text(text):
                raise ValueError(f"{shown(text)} is no valid text")
        return found

    def integer(digits: str) -> int:
        # Python takes quadratic time over long ones
        if len(digits) > 20:
            raise ValueError("an integer has more than 20 digits")
        return int(digits)

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=integer,
            parse_constant=constant,
        )
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_limited(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes. Raises FileError."""
    try:
        size = regular_size(path)
        if size > limit:
            fail(path, f"{size} bytes, expected at most {limit}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def regular_size(path: Path) -> int:
    """Bytes of the file at `path`. Raises FileError unless it is a regular file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    # a pipe would block when opened
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        fail(path, f"{kind}, expected a file")
    return status.st_size


def unreadable(path: Path, error: Exception) -> FileError:
    """The FileError for `error`, met while reading `path`."""
    if isinstance(error, FileError):
        return error
    if isinstance(error, FileNotFoundError):
        return FileError(f"{path}: no such file")
    return FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def fail(path: str | os.PathLike[str], message: str) -> NoReturn:
    """Raise a FileError about `path`."""
    raise FileError(f"{path}: {message}")


def shown(name: object) -> str:
    """`name` from a file as a message may show it: quoted, one line, not long."""
    text = ascii(name)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _read_text(path: Path) -> tuple[bytes, int, int]:
    """The header's JSON, the first byte of the data, and the bytes of data."""
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            n_header = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                fail(path, f"{size} bytes, too short for a safetensors file")
            if prefix == b"version ":
                fail(path, "a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            if n_header > HEADER_LIMIT:
                fail(
                    path,
                    f"no safetensors file, or a damaged one: its header would have {n_header}"
                    f" bytes, expected at most {HEADER_LIMIT}",
                )
            if 8 + n_header > size:
                fail(path, f"truncated: the header ends at byte {8 + n_header} of {size}")
            text = file.read(n_header)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if len(text) < n_header:
        fail(path, "became shorter while it was read")
    return text, 8 + n_header, size - 8 - n_header


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail(path, "__metadata__ of the safetensors header is no map of strings to strings")


def _entry(path: Path, name: str, raw: object, data_start: int) -> TensorEntry:
    tensor = f"tensor {shown(name)}"
    if not isinstance(raw, dict):
        fail(path, f"{tensor}: {shown(raw)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        fail(path, f"{tensor}: dtype {shown(dtype)} is not supported")
    # an empty tensor's other dimensions are limited by no bytes
    if not _are_sizes(shape) or math.prod(size or 1 for size in shape) >= 1 << 60:
        fail(path, f"{tensor}: shape {shown(shape)}, expected whole numbers")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(path, f"{tensor}: data_offsets {shown(offsets)}, expected its begin and end")
    begin, end = offsets
    n_bits = math.prod(shape) * BITS[dtype]
    if n_bits != 8 * (end - begin):
        fail(
            path,
            f"{tensor}: {dtype} of shape {shown(shape)} takes {n_bits // 8} bytes,"
            f" data_offsets {offsets} give {end - begin}",
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, end - begin)


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    # more dimensions than 8 no tensor has; their product would take time without end
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and value >= 0 for value in values)
    )


def _check_layout(path: Path, entries: list[TensorEntry], data_start: int, n_data: int) -> None:
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.n_bytes)):
        if entry.offset != end:
            fault = "overlaps the tensor before it" if entry.offset < end else "follows a gap"
            fail(path, f"tensor {shown(entry.name)}: {fault} (byte {entry.offset}, expected {end})")
        end += entry.n_bytes
    if end > data_start + n_data:
        missing = end - data_start - n_data
        fail(path, f"truncated: {missing} of {end} bytes are missing; fetch the file again")
    if end < data_start + n_data:
        fail(path, f"{data_start + n_data - end} bytes follow the last tensor")
