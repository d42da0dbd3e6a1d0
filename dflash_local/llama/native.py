"""The compiled part, linked to the same llama.cpp that `llama_cpp` has loaded.

Import it only from here. If the extension were imported before `llama_cpp`, it would load its own
copy of libllama, and models of one copy crash in the other. Raises ImportError if there are two.
"""

from __future__ import annotations

import ctypes
from typing import Any

from dflash_local.llama import runtime  # loads llama_cpp

# isort: split
from dflash_local._native import (
    N_COPY_KINDS,
    PRIVATE_DOUBTS,
    CopyChances,
    CopyIndex,
    CopyOffers,
    CopyPrior,
    DraftChances,
    FewRows,
    FewRowsScope,
    FusedDrafter,
    HeadsDrafter,
    TargetPass,
    ThreadPool,
    TokenDraw,
    can_replay,
    edit_cells,
    few_rows_attention,
    few_rows_driver,
    few_rows_gpus,
    few_rows_operand,
    few_rows_source,
    grow_tree,
    join_copies,
    keep_states_of_all_rows,
    llama_decode_address,
    try_few_rows,
    try_few_rows_attention,
    try_few_rows_experts,
)

runtime.check_same_library(llama_decode_address())

__all__ = [
    "N_COPY_KINDS",
    "PRIVATE_DOUBTS",
    "CopyChances",
    "CopyIndex",
    "CopyOffers",
    "CopyPrior",
    "DraftChances",
    "FewRows",
    "FewRowsScope",
    "FusedDrafter",
    "HeadsDrafter",
    "TargetPass",
    "ThreadPool",
    "TokenDraw",
    "address",
    "can_replay",
    "edit_cells",
    "few_rows_attention",
    "few_rows_driver",
    "few_rows_gpus",
    "few_rows_operand",
    "few_rows_source",
    "grow_tree",
    "join_copies",
    "keep_states_of_all_rows",
    "try_few_rows",
    "try_few_rows_attention",
    "try_few_rows_experts",
]


def address(handle: Any) -> int:
    """The address that a handle of `llama_cpp` points to, for the compiled part; 0 for none."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
