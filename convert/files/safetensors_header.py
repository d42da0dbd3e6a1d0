"""The header of a safetensors file, checked against the file before it is used.

Layout (https://huggingface.co/docs/safetensors): the header's length as 8 little-endian bytes, the
header in JSON, then the bytes of the tensors without gaps, up to the end of the file. The
safetensors package itself gives no BF16 without torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from .reading import fail, regular_size, shown, strict_json, unreadable

HEADER_LIMIT = 25_000_000
"""Bytes. The hub refuses longer headers; a drafter's has some 20,000."""

BITS = {
    name: bits
    for bits, names in {
        4: ("F4",),
        6: ("F6_E2M3", "F6_E3M2"),
        8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"),
        16: ("I16", "U16", "F16", "BF16"),
        32: ("I32", "U32", "F32"),
        64: ("I64", "U64", "F64", "C64"),
    }.items()
    for name in names
}
"""Bits of an element, by dtype."""


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


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors file at `path`. Raises FileError for a malformed one.

    Each tensor has as many bytes as its dtype and shape say, and together they fill the file.
    """
    text, data_start, n_data = _read_text(path)
    try:
        header = strict_json(text)
    except ValueError as error:
        fail(path, f"the safetensors header is malformed: {error}")
    if not isinstance(header, dict):
        fail(path, "the safetensors header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail(path, "__metadata__ of the safetensors header is no map of strings to strings")
    entries = {name: _entry(path, name, raw, data_start) for name, raw in header.items()}
    _check_layout(path, list(entries.values()), data_start, n_data)
    return entries


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


def _entry(path: Path, name: str, raw: object, data_start: int) -> TensorEntry:
    tensor = f"tensor {shown(name)}"
    if not isinstance(raw, dict):
        fail(path, f"{tensor}: {shown(raw)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = raw.get("dtype"), raw.get("shape"), raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        fail(path, f"{tensor}: dtype {shown(dtype)} is not supported")
    # no bytes limit the other dimensions of an empty tensor
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


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    # no tensor has more than 8 dimensions, and the product of very many takes too long
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
