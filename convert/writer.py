"""A GGUF file, written in pieces: it appears whole or not at all, and takes little memory.

The `gguf` package writes the header. It would need each tensor whole, so tensors are read, encoded
and written here.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from dflash_local.errors import InputError
from dflash_local.fit.footprint import size_text

from .files.lock import lock
from .key import Key
from .quantization import encode, n_bytes
from .tensors.plan import TensorPlan

_PIECE = 1 << 21  # values that are in memory at once, as f32
_PART = re.compile(r"\..+\.[0-9a-f]{16}\.part")
_ARCHITECTURE = "general.architecture"

Rows = Callable[[TensorPlan, int, int], NDArray[np.float32]]
Progress = Callable[[int, int], None]


def write_gguf(
    path: Path,
    keys: Sequence[Key],
    tensors: Sequence[tuple[TensorPlan, GGMLQuantizationType]],
    read_rows: Rows,
    *,
    force: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the file `path`, which must not exist unless `force` is given.

    `keys` hold `general.architecture`. `read_rows(plan, start, stop)` gives rows of a tensor, f32
    [stop - start, ne0]; a vector is one row. `progress` is called with the bytes of tensor data
    written so far and in all. `check` gets the complete file under another name, and may refuse it
    by an exception.

    The file appears at the end, complete; after an exception nothing of it is left, and the remains
    of a killed process in the folder are removed. The same arguments give the same bytes. Raises
    InputError when the file cannot be written: it exists, there is no such folder, no permission,
    not enough room.
    """
    total = sum(_padded(n_bytes(plan.shape, kind)) for plan, kind in tensors)
    check_place(path, force)
    # in the same folder, so that the last step is only a rename
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with _writing(path, total):
            free = shutil.disk_usage(path.parent).free
            if free < total:
                raise _no_room(path, total, free)
            _remove_abandoned(path.parent)
            with part.open("ab") as file:
                lock(file)
                _write_header(part, keys, tensors)
                file.seek(0, os.SEEK_END)
                _write_tensors(file, tensors, read_rows, total, progress)
                file.flush()
                os.fsync(file.fileno())
        if check is not None:
            check(part)
        check_place(path, force)
        with _writing(path, total):
            os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    for part in filter(_PART.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError), (folder / part).open("ab") as file:
            if lock(file):
                os.unlink(folder / part)


def check_place(path: Path, force: bool) -> None:
    """Raise InputError as `write_gguf` does, except for lack of room."""
    with _writing(path, 0):
        if path.is_dir():
            raise InputError(f"{path}: a folder, expected the name of the file to write")
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file, expected the name of the file to write")
        if path.exists() and not force:
            raise InputError(
                f"{path}: exists already; choose another name, or overwrite it with --force "
                "(force=True in Python)"
            )
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise InputError(
                f"{path}: the folder {path.parent} cannot be written to; choose another"
            )


def _no_room(path: Path, needed: int, free: int) -> InputError:
    return InputError(
        f"{path}: needs {size_text(needed)}, and {path.parent} has {size_text(free)} left; "
        "make room or choose another folder"
    )


@contextlib.contextmanager
def _writing(path: Path, needed: int) -> Iterator[None]:
    """Turn errors of writing into one line. Those of reading are FileErrors already."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                raise _no_room(path, needed, shutil.disk_usage(path.parent).free) from None
        room = f"; {size_text(needed)} are needed" if needed else ""
        raise InputError(f"{path}: cannot be written: {error.strerror or error}{room}") from None


def _write_header(
    part: Path, keys: Sequence[Key], tensors: Sequence[tuple[TensorPlan, GGMLQuantizationType]]
) -> None:
    values = {key.name: key for key in keys}
    writer = gguf.GGUFWriter(part, str(values[_ARCHITECTURE].value))
    for name, key in values.items():
        if name != _ARCHITECTURE:
            kinds = (GGUFValueType.ARRAY, key.kind) if key.is_array else (key.kind, None)
            writer.add_key_value(name, _raw(key), *kinds)
    for plan, quantization in tensors:
        writer.add_tensor_info(
            plan.name,
            tuple(reversed(plan.shape)),
            np.dtype(np.float32),
            n_bytes(plan.shape, quantization),
            raw_dtype=quantization,
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _raw(key: Key) -> object:
    # tokens of a vocabulary need not be UTF-8
    if key.kind != GGUFValueType.STRING:
        return key.value
    if isinstance(key.value, (list, tuple)):
        return [str(item).encode("utf-8", "surrogateescape") for item in key.value]
    return str(key.value).encode("utf-8", "surrogateescape")


def _write_tensors(
    file: BinaryIO,
    tensors: Sequence[tuple[TensorPlan, GGMLQuantizationType]],
    read_rows: Rows,
    total: int,
    progress: Progress | None,
) -> None:
    begin = file.tell() + (_pad(file) if tensors else 0)
    for plan, kind in tensors:
        for piece in _encoded(plan, kind, read_rows):
            file.write(piece)
            if progress is not None:
                progress(file.tell() - begin, total)
        _pad(file)
    if progress is not None:
        progress(file.tell() - begin, total)


def _encoded(plan: TensorPlan, kind: GGMLQuantizationType, read_rows: Rows) -> Iterator[bytes]:
    """The tensor's data in pieces of whole rows, of at most _PIECE values if a row has fewer."""
    length, n_rows = plan.shape[0], plan.n_rows
    step = max(1, _PIECE // length)
    for start in range(0, n_rows, step):
        stop = min(start + step, n_rows)
        rows = read_rows(plan, start, stop)
        if rows.shape != (stop - start, length):
            raise ValueError(f"{plan.name}: read {rows.shape}, expected {(stop - start, length)}")
        try:
            yield encode(rows, kind)
        except InputError as error:
            raise InputError(f"tensor '{plan.source or plan.name}': {error}") from None


def _pad(file: BinaryIO) -> int:
    """Fill up to GGUF's alignment; returns the number of bytes added."""
    missing = _padded(file.tell()) - file.tell()
    file.write(bytes(missing))
    return missing


def _padded(count: int) -> int:
    return gguf.GGUFWriter.ggml_pad(count, gguf.GGUF_DEFAULT_ALIGNMENT)
