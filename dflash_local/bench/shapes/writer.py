"""Pairs of random weights as GGUF files, written at the speed of the disk: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dflash_local.bench.shapes.file import ShapeFile, drafter_file, padded, target_file
from dflash_local.bench.shapes.shape import PairShape, find_shape
from dflash_local.bench.shapes.weights import RandomWeights
from dflash_local.errors import InputError
from dflash_local.fit.footprint import size_text


def write_pair(
    shape: str | PairShape,
    quant: str,
    folder: Path,
    *,
    drafter_quant: str = "Q8_0",
    n_layer: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, Path]:
    """Target and drafter of that shape as GGUF files with random weights in `folder`.

    `quant` is one of `tensors.QUANTS`; `n_layer` makes a target of fewer or more layers.
    `progress(done, total)` is called with the bytes of both files together. A file that is already
    there, with the same header and the right length, is left as it is. Files appear under their
    names when they are complete, and nothing is left of those that fail.

    Raises InputError for an unknown shape or quantisation, for a folder that cannot be written to,
    and, before anything is written, for one without enough room.
    """
    if isinstance(shape, str):
        shape = find_shape(shape)
    shape = shape.with_layers(n_layer)
    files = target_file(shape, quant), drafter_file(shape, drafter_quant)
    with _one_line_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the last step is a rename.
        with TemporaryDirectory(prefix=".dflash-local-", dir=folder) as unfinished:
            parts = {file.name: Path(unfinished, file.name) for file in files}
            missing = [
                file for file in files if not _is_there(file, folder / file.name, parts[file.name])
            ]
            _check_room(folder, missing)
            total, done = sum(file.n_data for file in missing), 0
            for file in missing:
                with parts[file.name].open("ab") as stream:
                    for piece in _data(file):
                        done += stream.write(piece)
                        if progress is not None:
                            progress(done, total)
                os.replace(parts[file.name], folder / file.name)
    target, drafter = (folder / file.name for file in files)
    return target, drafter


def _is_there(file: ShapeFile, final: Path, part: Path) -> bool:
    """Whether `final` is complete. Writes the header to `part`, to compare and to go on from."""
    n_header = file.write_header(part)
    try:
        if final.stat().st_size != n_header + file.n_data:
            return False
        with final.open("rb") as present:
            return present.read(n_header) == part.read_bytes()
    except OSError:
        return False


def _data(file: ShapeFile) -> Iterator[memoryview]:
    """The tensors in pieces, each tensor padded."""
    weights = RandomWeights(file.std)
    for tensor in file.tensors:
        if tensor.constant is None:
            yield from weights.take(tensor.type, tensor.n_bytes)
        else:
            yield np.full(tensor.shape, tensor.constant, np.float32).view(np.uint8).data
        yield memoryview(bytes(padded(tensor.n_bytes) - tensor.n_bytes))


def _check_room(folder: Path, files: Sequence[ShapeFile]) -> None:
    free = shutil.disk_usage(folder).free
    if free < sum(file.n_data for file in files):
        sizes = " and ".join(f"{size_text(file.n_data)} for {file.name}" for file in files)
        raise InputError(
            f"{folder}: needs {sizes}, and {size_text(free)} are free; make room, choose another "
            "folder, fewer layers or a smaller quantisation"
        )


@contextlib.contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Turn what the system says into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{folder}: the disk is full; make room or choose another") from None
        reason = error.strerror or error
        raise InputError(f"{folder}: cannot be written to: {reason}; choose another") from None
