"""The type that a tensor is stored as, and rows of floats as bytes of that type.

The mixtures are those of llama.cpp's quantizer (`src/llama-quant.cpp`), but the tensors that every
draft passes through keep at least 8 bits. ggml itself, as it is loaded, does the rounding.
"""

import ctypes
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, LlamaFileType, quants
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from dflash_local.errors import InputError
from dflash_local.gguf.drafter_tensors import D2T
from dflash_local.llama import runtime
from dflash_local.llama.host import default_threads

from .tensors.plan import TensorPlan

_SMALL = 4096  # elements; a smaller tensor is kept in F32
_PLAIN = (Type.F32, Type.F16, Type.BF16)
_CRITICAL = re.compile(r"(fc|output|selector_\w+|markov_\w+)\.weight")
_LAYER = re.compile(r"^blk\.(\d+)\.")
# where a row is not a whole number of blocks; as in llama.cpp
_FALLBACK = {Type.Q3_K: Type.Q4_0, Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}

OUTTYPES = (
    "f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s",
    "q4_1", "q4_0", "q3_k_m",
)  # fmt: skip


def file_type(outtype: str) -> int:
    """The value of `general.file_type` for one of OUTTYPES. Raises InputError."""
    kind = "ALL" if _outtype(outtype) == Type.F32 else "MOSTLY"
    return int(LlamaFileType[f"{kind}_{outtype.upper()}"])


def tensor_type(plan: TensorPlan, outtype: str, *, n_layer: int) -> Type:
    """The type that `plan`'s tensor is stored as in a file of `outtype`, one of OUTTYPES.

    `n_layer`: layers of the drafter, on which the mixtures depend. Tensors that every draft passes
    through (fc, selector, Markov heads, output head) get at least Q8_0. Raises InputError for an
    unknown outtype.
    """
    base = _outtype(outtype)
    if plan.name == D2T:
        return Type.I64
    if not _is_matrix(plan):
        return Type.F32
    if base in _PLAIN or base == Type.Q8_0:
        chosen = base
    elif _CRITICAL.fullmatch(plan.name):
        chosen = Type.Q8_0
    elif plan.name == "token_embd.weight":
        chosen = Type.Q6_K
    else:
        chosen = _mixed(plan.name, outtype, base, n_layer)
    return _fitting(chosen, plan.shape[0])


def n_bytes(shape: tuple[int, ...], kind: Type) -> int:
    """Bytes of a tensor of `shape` (row length first), whose rows are whole blocks of `kind`."""
    block, size = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def encode(rows: NDArray[np.float32], kind: Type, *, n_threads: int | None = None) -> bytes:
    """`rows`, f32 [n, row length], as bytes of `kind`, row after row.

    Every row is a whole number of blocks. Raises InputError for values that `kind` cannot hold.
    """
    if not np.isfinite(rows).all():
        raise InputError(f"{_not_finite(rows)} NaN or infinite; the source is damaged")
    if kind == Type.I64:
        return rows.astype("<i8").tobytes()
    if kind in _PLAIN:
        return _plain(rows, kind)
    return _quantized(np.ascontiguousarray(rows, np.float32), kind, n_threads or default_threads())


def _outtype(name: str) -> Type:
    """The type of most matrices."""
    if name not in OUTTYPES:
        raise InputError(f"outtype {name!r} is not known, expected one of {', '.join(OUTTYPES)}")
    return Type[name.upper().removesuffix("_M").removesuffix("_S")]


def _is_matrix(plan: TensorPlan) -> bool:
    return (
        plan.name.endswith(".weight")
        and len(plan.shape) == 2
        and plan.shape[1] > 1
        and plan.shape[0] * plan.shape[1] >= _SMALL
    )


def _mixed(name: str, outtype: str, base: Type, n_layer: int) -> Type:
    match = _LAYER.match(name)
    layer = int(match[1]) if match else n_layer
    part = name.removesuffix(".weight").rpartition(".")[2]
    more = outtype in ("q4_k_m", "q5_k_m") and _gets_more_bits(layer, n_layer)
    if part in ("attn_v", "ffn_down"):
        if more:
            return Type.Q6_K
        if outtype == "q4_k_s" and layer < (4 if part == "attn_v" else n_layer // 8):
            return Type.Q5_K
        if outtype == "q3_k_m":
            first = layer < (2 if part == "attn_v" else n_layer // 16)
            return Type.Q5_K if first else Type.Q4_K
    elif part == "attn_output" and outtype == "q3_k_m":
        return Type.Q4_K
    return base


def _gets_more_bits(layer: int, n_layer: int) -> bool:
    """The first eighth of the layers, the last, and every third between."""
    first = n_layer // 8
    return layer < first or layer >= 7 * n_layer // 8 or (layer - first) % 3 == 2


def _fitting(kind: Type, row_length: int) -> Type:
    if row_length % GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    kind = _FALLBACK.get(kind, kind)
    return kind if row_length % GGML_QUANT_SIZES[kind][0] == 0 else Type.F16


def _not_finite(rows: NDArray[np.float32]) -> str:
    count = int(rows.size - np.count_nonzero(np.isfinite(rows)))
    return "one value is" if count == 1 else f"{count} values are"


def _plain(rows: NDArray[np.float32], kind: Type) -> bytes:
    with np.errstate(over="ignore"):
        encoded = quants.quantize(rows, kind)
    if kind == Type.F16 and not np.isfinite(encoded).all():
        largest = float(np.abs(rows).max())
        raise InputError(
            f"the largest value, {largest:g}, does not fit F16, which ends at 65504; choose bf16"
        )
    return encoded.tobytes()


@cache
def _quantizer() -> Callable[..., int]:
    """`ggml_quantize_chunk` of ggml.h, which keeps no state for the types used here."""
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    return runtime.function(
        "ggml_quantize_chunk",
        ctypes.c_size_t,
        *(ctypes.c_int, pointer, pointer, count, count, count, pointer),
    )


def _quantized(rows: NDArray[np.float32], kind: Type, n_threads: int) -> bytes:
    n_rows, length = rows.shape
    encoded: NDArray[Any] = np.empty(n_bytes((length, n_rows), kind), np.uint8)
    quantize = _quantizer()

    def part(start: int, stop: int) -> None:
        # offsets are in values; no importance matrix
        quantize(
            int(kind),
            rows.ctypes.data,
            encoded.ctypes.data,
            start * length,
            stop - start,
            length,
            None,
        )

    bounds = np.linspace(0, n_rows, min(n_threads, n_rows) + 1).astype(int).tolist()
    spans = list(pairwise(bounds))
    if len(spans) == 1:
        part(*spans[0])
    elif spans:
        with ThreadPoolExecutor(len(spans)) as pool:
            list(pool.map(part, *zip(*spans, strict=True)))
    return encoded.tobytes()
