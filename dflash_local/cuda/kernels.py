"""The kernels that the matrices of a model need, as code for one GPU, compiled once and kept."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash_local import disk_cache
from dflash_local.cuda.compiler import Compiler
from dflash_local.llama import native

if TYPE_CHECKING:
    from dflash_local.gguf.file import GgufFile

TILES = (1, 2, 4)
"""Of eight columns, in a block of a kernel."""

_LAYER = re.compile(r"^blk\.\d+\.")
_ROW_TABLES = ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, order=True)
class Shape:
    """Matrices [`rows`, `k`] of a block type, by ggml's number of it."""

    type: int
    k: int
    rows: int

    @property
    def operand(self) -> str:
        """What the kernels call it; empty if there are none for it."""
        return native.few_rows_operand(self.type, self.k)

    @property
    def row_bytes(self) -> int:
        n_values, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        return self.k // n_values * n_bytes

    @property
    def type_name(self) -> str:
        return GGMLQuantizationType(self.type).name

    def __str__(self) -> str:
        return f"{self.type_name} {self.k} x {self.rows}"


Pair = tuple[str, str]
"""The operands of a kernel."""


def shapes_of(file: GgufFile) -> dict[str, Shape]:
    """The matrices of a file for which there are kernels, by their tensors' names. Experts are none
    of them, nor are tables of which only rows are read."""
    found = {}
    tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        if len(tensor.shape) != 2 or (
            name in _ROW_TABLES and not (tied and name == _ROW_TABLES[0])
        ):
            continue
        shape = Shape(tensor.type, *tensor.shape)
        if shape.operand:
            found[name] = shape
    return found


def pairs_of(shapes: Iterable[tuple[str, Shape]]) -> list[Pair]:
    """The operands of all launches that these matrices may need: each with itself, and two in one
    layer that may have the same input."""
    by_input = defaultdict(set)
    pairs = set()
    for name, shape in shapes:
        operand = (shape.type, shape.operand)
        pairs.add((operand, operand))
        layer = _LAYER.match(name)
        if layer:
            by_input[layer[0], shape.k].add(operand)
    for together in by_input.values():
        ordered = sorted(together)
        pairs |= {(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]}
    return [(a[1], b[1]) for a, b in sorted(pairs)]


def source_of(pair: Pair) -> str:
    """The text to compile for one pair of operands."""
    lines = [f"FEW_ROWS_PRODUCT({pair[0]}, {pair[1]}, {tiles})" for tiles in TILES]
    return "\n".join([native.few_rows_source(), *lines, ""])


def source_hash() -> str:
    """Of the kernels' text, for what depends on it."""
    return hashlib.sha256(native.few_rows_source().encode()).hexdigest()[:32]


def cubins(
    pairs: Sequence[Pair], architecture: int, compiler: Compiler, before: Callable[[], None]
) -> list[bytes]:
    """The code of all pairs. `before` is called if some of it must be compiled. Raises
    BackendError."""
    keys = {pair: _key(pair, architecture, compiler) for pair in pairs}
    kept = {pair: _read(key) for pair, key in keys.items()}
    missing = [pair for pair, code in kept.items() if code is None]
    if missing:
        before()
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            made = pool.map(lambda pair: compiler.compile(source_of(pair), architecture), missing)
            for pair, code in zip(missing, made, strict=True):
                kept[pair] = code.cubin
                content = base64.b64encode(code.cubin).decode()
                disk_cache.write("kernels", keys[pair], content)
    return [code for code in kept.values() if code is not None]


def _key(pair: Pair, architecture: int, compiler: Compiler) -> dict[str, object]:
    return {
        "source": hashlib.sha256(source_of(pair).encode()).hexdigest(),
        "architecture": architecture,
        "compiler": str(compiler),
    }


def _read(key: dict[str, object]) -> bytes | None:
    try:
        return base64.b64decode(disk_cache.read("kernels", key), validate=True)
    except (TypeError, ValueError):
        return None
