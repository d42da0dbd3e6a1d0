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
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from dflash_local.convert.quantization import encode
from dflash_local.errors import InputError
from dflash_local.fit.footprint import size_text
from lab.shapes.file import ShapeFile, drafter_file, padded, target_file
from lab.shapes.shape import PairShape, find_shape

_N_BLOCKS = {256: 16_381, 32: 131_071, 1: 4_194_301}
"""Blocks of a pool, by the values in a block, for 4 million values. They are primes, so that any
step from block to block goes through all of them."""


def write_pair(
    shape: str | PairShape,
    quant: str,
    folder: Path,
    *,
    n_layer: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, Path | None]:
    """Target and drafter of that shape as GGUF files with random weights in `folder`; no drafter,
    where the target has heads.

    `quant` is the target's, one of `tensors.QUANTS`; `n_layer` makes a target of fewer or more
    layers. `progress(done, total)` is called with the bytes of both files together. A file that is
    already there, with the same header and the right length, is left as it is. Files appear under
    their names when they are complete, and nothing is left of those that fail.

    Raises InputError for an unknown shape or quantisation, for a folder that cannot be written to,
    and, before anything is written, for one without enough room.
    """
    if isinstance(shape, str):
        shape = find_shape(shape)
    shape = shape.with_layers(n_layer)
    files = [target_file(shape, quant)]
    if not shape.n_further:
        files.append(drafter_file(shape))
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
    target, *drafter = (folder / file.name for file in files)
    return target, drafter[0] if drafter else None


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
    """Turn the system's error into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{folder}: the disk is full; make room or choose another") from None
        reason = error.strerror or error
        raise InputError(f"{folder}: cannot be written to: {reason}; choose another") from None


class RandomWeights:
    """Weights of standard deviation `std`: the same for the same order of calls.

    Quantising gigabytes would take minutes. So of each type a pool of some megabytes is drawn and
    quantised, and tensors are cut from it one after another. Each time round, its blocks come in
    another order. Otherwise rows of a large matrix would be equal, and so would the logits of many
    tokens: a sampler has to look at all logits to break such ties, which no trained model has.
    """

    def __init__(self, std: float) -> None:
        self._std = std
        self._pools: dict[Type, NDArray[np.uint8]] = {}  # [blocks, bytes]
        self._rounds: dict[Type, int] = {}
        self._left: dict[Type, memoryview] = {}

    def take(self, kind: Type, n_bytes: int) -> Iterator[memoryview]:
        """The next `n_bytes` of a type, whole blocks, in pieces of at most a pool."""
        while n_bytes:
            left = self._left.get(kind) or self._next_round(kind)
            n = min(n_bytes, len(left))
            yield left[:n]
            self._left[kind] = left[n:]
            n_bytes -= n

    def _next_round(self, kind: Type) -> memoryview:
        """All blocks of the pool, with a step from one to the next that no round before had."""
        if kind not in self._pools:
            blocks = np.frombuffer(self._draw(kind), np.uint8)
            self._pools[kind] = blocks.reshape(_N_BLOCKS[GGML_QUANT_SIZES[kind][0]], -1)
        pool = self._pools[kind]
        step = self._rounds[kind] = self._rounds.get(kind, 0) + 1
        order = np.arange(len(pool), dtype=np.int64) * step % len(pool)
        return pool[order].reshape(-1).data

    def _draw(self, kind: Type) -> bytes:
        n_values, _ = GGML_QUANT_SIZES[kind]
        random = np.random.default_rng([0, int(kind)])
        values = random.standard_normal(_N_BLOCKS[n_values] * n_values, dtype=np.float32)
        values *= np.float32(self._std)
        return encode(values.reshape(-1, n_values) if n_values > 1 else values[None], kind)
