"""The compiled part, linked to the same llama.cpp that `llama_cpp` has loaded.

Import it only from here. If the extension were imported before `llama_cpp`, it would load its own
copy of libllama, and models of one copy crash in the other. Raises ImportError if there are two.
"""

import ctypes
import os
from typing import Any

from dflash_local.llama import runtime  # loads llama_cpp

# isort: split
from dflash_local._native import *  # noqa: F403
from dflash_local._native import llama_decode_address, speed_up_experts

FEW_ROWS = "DFLASH_LOCAL_FEW_ROWS"
"""0: llama.cpp multiplies everything, for comparisons."""


def has_own_kernels() -> bool:
    """Whether the environment lets our kernels run."""
    return os.environ.get(FEW_ROWS) != "0"


runtime.check_same_library(llama_decode_address())
if has_own_kernels():
    runtime.when_ready(speed_up_experts)


def address(handle: Any) -> int:
    """The address that a handle of `llama_cpp` points to, for the compiled part; 0 for none."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
