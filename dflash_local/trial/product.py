"""One quantised matrix product through every weight layout of ggml's CPU backend.

GCC before 13 miscompiles the set-up of AMX tiles. A llama.cpp that was built natively with it dies
at the first such product of more than one row. That is found here, without any model.
"""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

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
_call = runtime.function


class _InitParams(ctypes.Structure):
    """`ggml_init_params` of ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def wrong_product() -> str | None:
    """None if every product is right, else the wrong value in words. May kill the process."""
    device = _call("ggml_backend_dev_by_type", _POINTER, ctypes.c_int)(_CPU)
    backend = _call("ggml_backend_dev_init", _POINTER, _POINTER, ctypes.c_char_p)(device, None)
    try:
        for layout in _layouts(device):
            for kind, block in _BLOCKS_OF_ONES.items():
                worst = _worst_value(backend, layout, kind, block)
                if worst is not None and not abs(worst - _WIDTH) < 0.01 * _WIDTH:
                    name = _call("ggml_backend_buft_name", ctypes.c_char_p, _POINTER)(layout)
                    return f"{worst} instead of {_WIDTH} (layout {name.decode()}, type {kind})"
    finally:
        _call("ggml_backend_free", None, _POINTER)(backend)
    return None


def _layouts(device: int) -> Iterator[int]:
    """The CPU's buffer types: the plain one, and those that rearrange weights (AMX, repacked)."""
    yield _call("ggml_backend_dev_buffer_type", _POINTER, _POINTER)(device)
    registry = _call("ggml_backend_dev_backend_reg", _POINTER, _POINTER)(device)
    address = _call("ggml_backend_reg_get_proc_address", _POINTER, _POINTER, ctypes.c_char_p)(
        registry, b"ggml_backend_dev_get_extra_bufts"
    )
    if not address:
        return
    layouts = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)(device)
    index = 0
    while layouts and layouts[index]:
        yield layouts[index]
        index += 1


def _worst_value(backend: int, layout: int, kind: int, block: bytes) -> float | None:
    """The value farthest from the right one; None if the layout does not support this type."""
    weight_data = block * (_WIDTH // 32 * _ROWS)
    input_data = (ctypes.c_float * (_WIDTH * _COLUMNS))(*([1.0] * (_WIDTH * _COLUMNS)))
    result = (ctypes.c_float * (_ROWS * _COLUMNS))()
    allocate = _call("ggml_backend_alloc_ctx_tensors_from_buft", _POINTER, _POINTER, _POINTER)
    plain = _call("ggml_backend_get_default_buffer_type", _POINTER, _POINTER)(backend)
    new_matrix = _call(
        "ggml_new_tensor_2d", _POINTER, _POINTER, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    )
    upload = _call(
        "ggml_backend_tensor_set", None, _POINTER, _POINTER, ctypes.c_size_t, ctypes.c_size_t
    )
    with _context() as weight_context, _context() as context:
        weights = new_matrix(weight_context, kind, _WIDTH, _ROWS)
        weight_buffer = allocate(weight_context, layout)
        inputs = new_matrix(context, _F32, _WIDTH, _COLUMNS)
        product = _call("ggml_mul_mat", _POINTER, _POINTER, _POINTER, _POINTER)(
            context, weights, inputs
        )
        buffer = allocate(context, plain)
        try:
            supports = _call("ggml_backend_supports_op", ctypes.c_bool, _POINTER, _POINTER)
            if not (weight_buffer and buffer and supports(backend, product)):
                return None
            upload(weights, weight_data, 0, len(weight_data))
            upload(inputs, ctypes.addressof(input_data), 0, ctypes.sizeof(input_data))
            graph = _call("ggml_new_graph", _POINTER, _POINTER)(context)
            _call("ggml_build_forward_expand", None, _POINTER, _POINTER)(graph, product)
            status = _call("ggml_backend_graph_compute", ctypes.c_int, _POINTER, _POINTER)(
                backend, graph
            )
            download = _call(
                "ggml_backend_tensor_get",
                None,
                _POINTER,
                _POINTER,
                ctypes.c_size_t,
                ctypes.c_size_t,
            )
            download(product, ctypes.addressof(result), 0, ctypes.sizeof(result))
        finally:
            for held in (weight_buffer, buffer):
                if held:
                    _call("ggml_backend_buffer_free", None, _POINTER)(held)
    if status != 0:
        return math.nan
    values: list[float] = list(result)
    return max(values, key=lambda value: math.inf if math.isnan(value) else abs(value - _WIDTH))


@contextmanager
def _context() -> Iterator[int]:
    graph_bytes = _call("ggml_graph_overhead", ctypes.c_size_t)()
    tensor_bytes = _call("ggml_tensor_overhead", ctypes.c_size_t)()
    size = graph_bytes + 8 * tensor_bytes
    context = _call("ggml_init", _POINTER, _InitParams)(_InitParams(size, None, True))
    try:
        yield context
    finally:
        _call("ggml_free", None, _POINTER)(context)
