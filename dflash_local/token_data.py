"""`llama_token_data`: tokens with their logits, as llama.cpp's samplers take and change them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local import runtime  # noqa: F401  (the check of the installed llama_cpp comes first)

# isort: split
import llama_cpp.llama_cpp as api

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def token_data_array(data: NDArray[Any]) -> api.llama_token_data_array:
    """A view of `data`, of dtype `TOKEN_DATA`; `data` must outlive it."""
    pointer = ctypes.cast(data.ctypes.data, api.llama_token_data_p)
    return api.llama_token_data_array(pointer, len(data), -1, False)
