"""The compiled part, over the very llama.cpp that `llama_cpp` has loaded.

Everyone takes it from here: an extension that is imported before `llama_cpp` loads a libllama of
its own, and models of one copy crash in the other. Raises ImportError when there are two.
"""

from __future__ import annotations

import ctypes
from typing import Any

from dflash_local.llama import runtime  # loads llama_cpp

# isort: split
from dflash_local import _native

runtime.check_same_library(_native.llama_decode_address())

FusedDrafter = _native.FusedDrafter
TargetPass = _native.TargetPass
ThreadPool = _native.ThreadPool
edit_cells = _native.edit_cells
grow_tree = _native.grow_tree

__all__ = ["FusedDrafter", "TargetPass", "ThreadPool", "address", "edit_cells", "grow_tree"]


def address(handle: Any) -> int:
    """Where a handle of `llama_cpp` points, as the compiled part takes it; 0 for none."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
