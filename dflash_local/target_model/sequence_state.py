"""Saves a sequence's state in a llama.cpp context as bytes in host memory, and restores it.

Restore bytes only in a context of the same model and options: llama.cpp does not check everything.
Of layers with a sliding window only the window is saved. With `state_only`, the keys and values of
attention layers are left out and left alone: the rest is the recurrent state.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.llama.runtime import api


def size_of(context: Any, seq: int, *, state_only: bool = False) -> int:
    """The number of bytes that `save` would return."""
    return int(api.llama_state_seq_get_size_ext(context, seq, _flags(state_only)))


def save(context: Any, seq: int, *, state_only: bool = False) -> NDArray[np.uint8]:
    """Keys and values of all cells of a sequence, uint8 [n]; empty if llama.cpp cannot save."""
    state = np.empty(size_of(context, seq, state_only=state_only), np.uint8)
    flags = _flags(state_only)
    n = api.llama_state_seq_get_data_ext(context, _pointer(state), len(state), seq, flags)
    return state[:n]


def restore(context: Any, seq: int, state: NDArray[np.uint8], *, state_only: bool = False) -> bool:
    """Replace the cells of a sequence by saved ones.

    False if there are too few free cells or the bytes do not fit this context. The sequence is then
    empty.
    """
    flags = _flags(state_only)
    n = api.llama_state_seq_set_data_ext(context, _pointer(state), len(state), seq, flags)
    if n == len(state) > 0:
        return True
    api.llama_memory_seq_rm(api.llama_get_memory(context), seq, -1, -1)
    return False


def _flags(state_only: bool) -> int:
    none, partial = api.LLAMA_STATE_SEQ_FLAGS_NONE, api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    return int(partial if state_only else none)


def size_of_all(context: Any) -> int:
    """The bytes of host memory that `pack` takes for a moment."""
    return int(api.llama_state_get_size(context))


def pack(context: Any) -> bool:
    """Move the cells of all sequences together, in their order, so that no free cell is left
    between them. False if llama.cpp cannot; the cache is then empty."""
    state = np.empty(size_of_all(context), np.uint8)
    n = api.llama_state_get_data(context, _pointer(state), len(state))
    return bool(0 < n == api.llama_state_set_data(context, _pointer(state), n))


def _pointer(state: NDArray[np.uint8]) -> Any:
    return ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
