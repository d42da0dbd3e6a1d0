"""One quantised matrix product through every weight layout of ggml's CPU backend.

GCC before 13 miscompiles the set-up of AMX tiles. A llama.cpp that was built natively with it dies
at the first such product of more than one row. That is found here, without any model.
"""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dflash_local.llama import runtime

_WIDTH, _ROWS, _COLUMNS = 512, 64, 32
_F32 = 0
# type number -> one block of 32 weights that are all 1: a half-precision scale of 1, the codes
_BLOCKS_OF_ONES = {
    2: bytes((0x00, 0x3C)) + bytes((0x99,)) * 16,  # Q4_0
    8: bytes((0x00, 0x3C)) + bytes((0x01,)) * 32,  # Q8_0
}
_CPU = 0
_POINTER = ctypes.c_void_p


def _ggml(name: str, *arguments: Any, result: Any = _POINTER) -> Any:
    """Call a function of ggml; arguments are of ctypes' types, as is a pointer that it returns."""
    found = runtime.function(name, result, *map(type, arguments))(*arguments)
    return _POINTER(found) if result is _POINTER else found


class _InitParams(ctypes.Structure):
    """`ggml_init_params` of ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def wrong_product() -> str | None:
    """None if every product is right, else the wrong value in words. May kill the process."""
    device = _ggml("ggml_backend_dev_by_type", ctypes.c_int(_CPU))
    backend = _ggml("ggml_backend_dev_init", device, ctypes.c_char_p(None))
    try:
        for layout in _layouts(device):
            for kind, block in _BLOCKS_OF_ONES.items():
                worst = _worst_value(backend, layout, kind, block)
                if worst is not None and not abs(worst - _WIDTH) < 0.01 * _WIDTH:
                    name = _ggml("ggml_backend_buft_name", layout, result=ctypes.c_char_p)
                    return f"{worst} instead of {_WIDTH} (layout {name.decode()}, type {kind})"
    finally:
        _ggml("ggml_backend_free", backend, result=None)
    return None


def _layouts(device: Any) -> Iterator[Any]:
    """The CPU's buffer types: the plain one, and those that rearrange weights (AMX, repacked)."""
    yield _ggml("ggml_backend_dev_buffer_type", device)
    registry = _ggml("ggml_backend_dev_backend_reg", device)
    wanted = ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts")
    address = _ggml("ggml_backend_reg_get_proc_address", registry, wanted)
    if not address:
        return
    layouts = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address.value)(device)
    index = 0
    while layouts and layouts[index]:
        yield _POINTER(layouts[index])
        index += 1


def _worst_value(backend: Any, layout: Any, kind: int, block: bytes) -> float | None:
    """The value farthest from the right one; None if the layout does not support this type."""
    blocks = block * (_WIDTH // 32 * _ROWS)
    weight_data = ctypes.create_string_buffer(blocks, len(blocks))
    input_data = (ctypes.c_float * (_WIDTH * _COLUMNS))(*([1.0] * (_WIDTH * _COLUMNS)))
    result = (ctypes.c_float * (_ROWS * _COLUMNS))()
    size, cells = ctypes.c_size_t, ctypes.c_int64
    with _context() as weight_context, _context() as context:
        shape = cells(_WIDTH), cells(_ROWS)
        weights = _ggml("ggml_new_tensor_2d", weight_context, ctypes.c_int(kind), *shape)
        weight_buffer = _ggml("ggml_backend_alloc_ctx_tensors_from_buft", weight_context, layout)
        shape = cells(_WIDTH), cells(_COLUMNS)
        inputs = _ggml("ggml_new_tensor_2d", context, ctypes.c_int(_F32), *shape)
        product = _ggml("ggml_mul_mat", context, weights, inputs)
        plain = _ggml("ggml_backend_get_default_buffer_type", backend)
        buffer = _ggml("ggml_backend_alloc_ctx_tensors_from_buft", context, plain)
        try:
            can = _ggml("ggml_backend_supports_op", backend, product, result=ctypes.c_bool)
            if not (weight_buffer and buffer and can):
                return None
            for tensor, data in ((weights, weight_data), (inputs, input_data)):
                given = _POINTER(ctypes.addressof(data)), size(0), size(ctypes.sizeof(data))
                _ggml("ggml_backend_tensor_set", tensor, *given, result=None)
            graph = _ggml("ggml_new_graph", context)
            _ggml("ggml_build_forward_expand", graph, product, result=None)
            status = _ggml("ggml_backend_graph_compute", backend, graph, result=ctypes.c_int)
            taken = _POINTER(ctypes.addressof(result)), size(0), size(ctypes.sizeof(result))
            _ggml("ggml_backend_tensor_get", product, *taken, result=None)
        finally:
            for held in (weight_buffer, buffer):
                if held:
                    _ggml("ggml_backend_buffer_free", held, result=None)
    if status != 0:
        return math.nan
    values: list[float] = list(result)
    return max(values, key=lambda value: math.inf if math.isnan(value) else abs(value - _WIDTH))


@contextmanager
def _context() -> Iterator[Any]:
    n_bytes = _ggml("ggml_graph_overhead", result=ctypes.c_size_t)
    n_bytes += 8 * _ggml("ggml_tensor_overhead", result=ctypes.c_size_t)
    context = _ggml("ggml_init", _InitParams(n_bytes, None, True))
    try:
        yield context
    finally:
        _ggml("ggml_free", context, result=None)
