"""The compiled part, linked to the same llama.cpp that `llama_cpp` has loaded.

Import it only from here. If the extension were imported before `llama_cpp`, it would load its own
copy of libllama, and models of one copy crash in the other. Raises ImportError if there are two.
"""

import ctypes
from typing import Any

from dflash_local.llama import runtime  # loads llama_cpp

# isort: split
from dflash_local._native import *  # noqa: F403
from dflash_local._native import llama_decode_address

runtime.check_same_library(llama_decode_address())


def address(handle: Any) -> int:
    """The address that a handle of `llama_cpp` points to, for the compiled part; 0 for none."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
