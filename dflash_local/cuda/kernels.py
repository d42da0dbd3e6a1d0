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
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ3_S, IQ3_XXS

from dflash_local import disk_cache
from dflash_local.cuda.compiler import Compiler
from dflash_local.llama import native

if TYPE_CHECKING:
    from dflash_local.gguf.file import GgufFile

TILES = (1, 2, 4)
"""Of eight columns, in a block of a kernel."""

_PLAIN = "F32"
"""Matrices of floats, such as routers, are in every piece of code, and share no launch."""
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
        """The kernels' name for it; empty if there are none for it."""
        if self.type == GGMLQuantizationType.F32:
            return _PLAIN if self.k % 32 == 0 else ""
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


@dataclass(frozen=True, order=True)
class Heads:
    """Attention over a cache of these types, by ggml's numbers of them; `n_heads` share the keys
    and values of `n_kv_heads`."""

    keys: int
    values: int
    head_dim: int
    n_heads: int
    n_kv_heads: int

    @property
    def operand(self) -> str:
        """The kernels' name for it; empty if there are none for it."""
        return native.few_rows_attention(self.keys, self.values, self.head_dim)

    @property
    def type_name(self) -> str:
        return f"attention over {GGMLQuantizationType(self.keys).name}"

    def __str__(self) -> str:
        return f"{self.type_name}, {self.n_heads} heads of {self.head_dim} on {self.n_kv_heads}"


@dataclass(frozen=True, order=True)
class Experts:
    """Matrices [`rows`, `k`] of a block type, one for each of `n_experts`; a row of a pass is
    multiplied by `n_used` of them."""

    type: int
    k: int
    rows: int
    n_experts: int
    n_used: int

    @property
    def operand(self) -> str:
        """The kernels' name for it; empty if there are none for it."""
        return native.few_rows_operand(self.type, self.k)

    @property
    def type_name(self) -> str:
        return f"experts in {GGMLQuantizationType(self.type).name}"

    def __str__(self) -> str:
        return f"{self.type_name}, {self.n_used} of {self.n_experts}, {self.k} x {self.rows}"


Kind = Shape | Heads | Experts
"""The subject of a trial."""
Pair = tuple[str, str]
"""The operands of a kernel."""
Compiled = Pair | Heads | Experts
"""The kinds of work that kernels are compiled for."""


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


def heads_of(file: GgufFile, key_type: str, value_type: str) -> set[Heads]:
    """The kinds of attention of a target over a cache of these types for which there are
    kernels."""
    n_heads = file.largest("attention.head_count")
    n_kv_heads = file.largest("attention.head_count_kv") or n_heads
    usual = file.largest("embedding_length") // n_heads if n_heads else 0
    of_keys, of_values = (GGMLQuantizationType[t.upper()].value for t in (key_type, value_type))
    found = set()
    for end in ("", "_swa"):
        keys = file.largest(f"attention.key_length{end}") or usual
        values = file.largest(f"attention.value_length{end}") or usual
        heads = Heads(of_keys, of_values, keys, n_heads, n_kv_heads)
        if keys == values and n_kv_heads and n_heads % n_kv_heads == 0 and heads.operand:
            found.add(heads)
    return found


def experts_of(file: GgufFile) -> set[Experts]:
    """The matrices of experts of a file for which there are kernels."""
    n_used = file.largest("expert_used_count")
    found = set()
    for name, tensor in file.tensors.items():
        if n_used and len(tensor.shape) == 3 and name.endswith("_exps.weight"):
            experts = Experts(tensor.type, *tensor.shape, n_used)
            if experts.operand:
                found.add(experts)
    return found


def pairs_of(shapes: Iterable[tuple[str, Shape]]) -> list[Pair]:
    """The operands of all launches that these matrices may need: each with itself, and two in one
    layer that may have the same input."""
    by_input = defaultdict(set)
    pairs = set()
    for name, shape in shapes:
        if shape.operand == _PLAIN:
            continue
        operand = (shape.type, shape.operand)
        pairs.add((operand, operand))
        layer = _LAYER.match(name)
        if layer:
            by_input[layer[0], shape.k].add(operand)
    for together in by_input.values():
        ordered = sorted(together)
        pairs |= {(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]}
    return [(a[1], b[1]) for a, b in sorted(pairs)]


def source_of(kernel: Compiled) -> str:
    """The text to compile for a pair of operands, a kind of attention, or of experts."""
    if isinstance(kernel, Heads):
        keys, values = (GGMLQuantizationType(t).name for t in (kernel.keys, kernel.values))
        lines = [f"FEW_ROWS_ATTENTION({keys}, {values}, {kernel.head_dim})"]
    elif isinstance(kernel, Experts):
        lines = [f"FEW_ROWS_EXPERTS({kernel.operand})"]
    else:
        lines = [f"FEW_ROWS_PRODUCT({kernel[0]}, {kernel[1]}, {tiles})" for tiles in TILES]
    tables = _tables() if "IQ3" in "".join(lines) else []
    return "\n".join([*tables, native.few_rows_source(), *lines, ""])


@cache
def _tables() -> list[str]:
    """The codebooks of IQ3 blocks, four bytes an entry, for block_types.cuh."""
    lines = ["#define FEW_ROWS_GRIDS"]
    codebooks: dict[str, Any] = {"iq3_xxs_grid": IQ3_XXS, "iq3_s_grid": IQ3_S}
    for name, blocks in codebooks.items():
        blocks.init_grid()
        entries = blocks.grid.reshape(blocks.grid_shape).astype(np.uint8).copy().view("<u4")
        listed = ", ".join(f"{entry:#x}u" for entry in entries[:, 0])
        lines.append(f"__device__ const unsigned {name}[{len(entries)}] = {{{listed}}};")
    return lines


def source_hash() -> str:
    """Of the kernels' text, for what depends on it."""
    return hashlib.sha256(native.few_rows_source().encode()).hexdigest()[:32]


def cubins(
    kernels: Sequence[Compiled], architecture: int, compiler: Compiler, before: Callable[[], None]
) -> list[bytes]:
    """The code of all kernels. `before` is called if some of it must be compiled. Raises
    BackendError."""
    sources = list(dict.fromkeys(source_of(kernel) for kernel in kernels))
    keys = {source: _key(source, architecture, compiler) for source in sources}
    kept = {source: _read(key) for source, key in keys.items()}
    missing = [source for source, code in kept.items() if code is None]
    if missing:
        before()
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            made = pool.map(lambda source: compiler.compile(source, architecture), missing)
            for source, (code, _) in zip(missing, made, strict=True):
                kept[source] = code
                content = base64.b64encode(code).decode()
                disk_cache.write("kernels", keys[source], content)
    return [code for code in kept.values() if code is not None]


def _key(source: str, architecture: int, compiler: Compiler) -> dict[str, object]:
    return {
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "architecture": architecture,
        "compiler": str(compiler),
    }


def _read(key: dict[str, object]) -> bytes | None:
    try:
        return base64.b64decode(disk_cache.read("kernels", key), validate=True)
    except (TypeError, ValueError):
        return None
