"""Files of random weights, written at the speed of the disk: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from dflash_local.bench.shapes.file import ShapeFile
from dflash_local.bench.shapes.tensors import TensorSpec
from dflash_local.bench.shapes.weights import RandomBlocks
from dflash_local.errors import InputError
from dflash_local.fit.footprint import size_text

Progress = Callable[[int, int], None]

_STEP = 1 << 25  # bytes between two reports


def write_files(
    folder: Path, files: Sequence[ShapeFile], progress: Progress | None = None
) -> tuple[Path, ...]:
    """Write those of `files` that are not in `folder` yet; all their paths.

    A file counts as there when its header is the one that would be written and its length is right.
    Raises InputError where the folder cannot be made or written to, or has too little room: that,
    with the numbers, before any weight is written.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        parts = [stack.enter_context(_part(folder, file)) for file in files]
        missing = [part for part in parts if not part.is_there()]
        total = sum(part.n_data for part in missing)
        _check_room(folder, missing, total)
        report = _Report(progress, total)
        for part in missing:
            with _writing(folder):
                part.write(report)
                os.replace(part.path, part.final)
        return tuple(part.final for part in parts)


class _Report:
    """Bytes written so far, of all files together."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._told = 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._done - self._told >= _STEP or self._done == self._total:
            self._told = self._done
            if self._progress:
                self._progress(self._done, self._total)


@dataclass(frozen=True)
class _Part:
    """A file under its temporary name, header written."""

    path: Path
    final: Path
    file: ShapeFile
    n_header: int

    @property
    def n_data(self) -> int:
        return sum(_padded(tensor.n_bytes) for tensor in self.file.tensors)

    def is_there(self) -> bool:
        """Whether the complete file lies under its final name already."""
        try:
            if self.final.stat().st_size != self.n_header + self.n_data:
                return False
            with self.path.open("rb") as ours, self.final.open("rb") as theirs:
                return ours.read() == theirs.read(self.n_header)
        except OSError:
            return False

    def write(self, report: _Report) -> None:
        """Append the weights. They can be made again, so nothing waits for the disk."""
        blocks = RandomBlocks(self.file.std)
        with self.path.open("ab", buffering=0) as stream:
            for tensor in self.file.tensors:
                for piece in _pieces(tensor, blocks):
                    _write_all(stream, piece)
                    report.add(len(piece))
                padding = memoryview(bytes(_padded(tensor.n_bytes) - tensor.n_bytes))
                _write_all(stream, padding)
                report.add(len(padding))


@contextlib.contextmanager
def _part(folder: Path, file: ShapeFile) -> Iterator[_Part]:
    """The file begun under a temporary name, which is gone in the end."""
    # in the same folder, so that the last step is a rename
    path = folder / f".{file.name}.{secrets.token_hex(8)}.part"
    try:
        with _writing(folder):
            yield _Part(path, folder / file.name, file, _write_header(path, file))
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _write_header(path: Path, file: ShapeFile) -> int:
    """Keys and tensor infos, filled up to where the weights begin; its length in bytes."""
    writer = gguf.GGUFWriter(path, file.architecture)
    for key in file.keys:
        writer.add_key_value(key.name, key.value, key.type, key.element)
    for tensor in file.tensors:
        writer.add_tensor_info(
            tensor.name,
            tuple(reversed(tensor.shape)),
            np.dtype(np.float32),
            tensor.n_bytes,
            raw_dtype=tensor.type,
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with path.open("ab") as stream:
        stream.write(bytes(_padded(stream.tell()) - stream.tell()))
        return stream.tell()


def _pieces(tensor: TensorSpec, blocks: RandomBlocks) -> Iterator[memoryview]:
    if tensor.constant is None:
        return blocks.take(tensor.type, tensor.n_bytes)
    return iter([np.full(tensor.shape, tensor.constant, np.float32).view(np.uint8).data])


def _write_all(stream: BinaryIO, piece: memoryview) -> None:
    # an unbuffered file may take less than it is given
    while len(piece):
        piece = piece[stream.write(piece) :]


def _check_room(folder: Path, parts: Sequence[_Part], total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total:
        sizes = " and ".join(f"{size_text(part.n_data)} for {part.final.name}" for part in parts)
        raise InputError(
            f"{folder}: needs {sizes}, and {size_text(free)} are free; make room, choose another "
            "folder, fewer layers or a smaller quantisation"
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what the system says into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{folder}: the disk is full; make room or choose another") from None
        reason = error.strerror or error
        raise InputError(f"{folder}: cannot be written to: {reason}; choose another") from None


def _padded(count: int) -> int:
    return -(-count // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
