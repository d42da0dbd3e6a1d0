"""llama.cpp's own context of a drafter, beside that of its target.

llama.cpp aborts if it is used wrongly. So callers must obey what the docstrings ask for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from dflash_local.errors import BackendError, FileError
from dflash_local.llama import runtime

# isort: split
import llama_cpp.llama_cpp as api

# C++ functions, by the name that each compiler gives them
_SET_LATTICE = (
    "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
)
_GET_LATTICE = (
    "_Z26llama_get_embeddings_nextnP13llama_context",
    "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
)


class DraftContext:
    """A model of the architecture `dflash` and its context, on the CPU. Close it before the
    target's.

    `n_seq` sequences share `n_cells` of f16 KV cache. A batch has at most `n_rows` rows. `lattice`:
    the rows of DFlash 2's selector are wanted instead of logits. The rows of a sequence are
    adjacent in a batch, at the positions after those that it has. In batches of tokens every
    sequence has the same number of rows.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target_context: Any,
        *,
        n_seq: int,
        n_cells: int,
        n_rows: int,
        n_threads: int,
        flash_attn: bool = True,
        causal: bool = False,
        lattice: bool = False,
    ) -> None:
        """Raises FileError if llama.cpp refuses the file, BackendError if memory is short."""
        runtime.init()
        params = api.llama_context_default_params()
        params.n_ctx = n_cells
        params.n_batch = params.n_ubatch = params.n_outputs_max = n_rows
        params.n_seq_max = n_seq
        params.n_threads = params.n_threads_batch = n_threads
        # llama.cpp finds out whether the device has it for these heads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_AUTO if flash_attn else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = int(GGMLQuantizationType.F16)
        params.kv_unified = True
        # A window that only keeps its last cells cannot be rolled back past them.
        params.swa_full = True
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        params.ctx_other = target_context
        self._has_lattice = lattice
        self._context: Any = None
        self._model: Any = None
        try:
            self._load(Path(path))
            self._open(params)
        except BaseException:
            self.close()
            raise
        api.llama_set_causal_attn(self._context, causal)

    def _load(self, path: Path) -> None:
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        no_devices = (ctypes.c_void_p * 1)(None)
        params.devices = ctypes.addressof(no_devices)
        runtime.clear_log()
        self._model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise FileError(f"llama.cpp cannot load {path}: {runtime.reason()}")
        self.n_vocab: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self.n_embd: int = api.llama_model_n_embd(self._model)
        kind = api.llama_model_rope_type(self._model)
        self._n_position = 4 if kind == api.LLAMA_ROPE_TYPE_MROPE else 1

    def _open(self, params: Any) -> None:
        runtime.clear_log()
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise BackendError(
                f"llama.cpp has no room for the drafter's context of {params.n_ctx} tokens: "
                f"{runtime.reason()}; load with a smaller n_ctx or without a drafter"
            )
        self.address = ctypes.cast(self._context, ctypes.c_void_p).value
        if self._has_lattice:
            on = _function(_SET_LATTICE, None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
            on(self.address, True, False)  # a row for every token, even if it is not an output
            self._lattice = _function(_GET_LATTICE, ctypes.c_void_p, ctypes.c_void_p)

    def inject(
        self, features: NDArray[np.float32], positions: Sequence[int], seqs: Sequence[int]
    ) -> None:
        """Turn context features, float32 [n, n_features] contiguous, into keys and values.

        1 to `n_rows` rows of finite numbers. Raises BackendError if llama.cpp fails.
        """
        planes = np.zeros((self._n_position, len(features)), np.int32)
        planes[:3] = np.asarray(positions, np.int32)  # M-RoPE: time, height, width; then nothing
        output = np.zeros(len(features), np.int8)
        self._decode(len(features), None, features, planes, seqs, output)

    def draft(self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int]) -> None:
        """Decode blocks of tokens, 1 to `n_rows` rows. Their cells stay.

        Raises BackendError if llama.cpp fails.
        """
        # Rows of logits are read by their place in the batch, so all rows are outputs, or none.
        output = np.full(len(tokens), not self._has_lattice, np.int8)
        ids = np.asarray(tokens, np.int32)
        self._decode(len(ids), ids, None, np.asarray(positions, np.int32), seqs, output)

    def _decode(
        self,
        n: int,
        tokens: NDArray[np.int32] | None,
        features: NDArray[np.float32] | None,
        positions: NDArray[np.int32],
        seqs: Sequence[int],
        output: NDArray[np.int8],
    ) -> None:
        seq_ids = np.asarray(seqs, np.int32)
        counts = np.ones(n, np.int32)
        rows = seq_ids.ctypes.data + seq_ids.itemsize * np.arange(n, dtype=np.uintp)
        batch = api.llama_batch()
        batch.n_tokens = n
        if tokens is not None:
            batch.token = _pointer(tokens, api.llama_token)
        if features is not None:
            batch.embd = _pointer(features, ctypes.c_float)
        batch.pos = _pointer(positions, api.llama_pos)
        batch.n_seq_id = _pointer(counts, ctypes.c_int32)
        batch.seq_id = _pointer(rows, ctypes.POINTER(api.llama_seq_id))
        batch.logits = _pointer(output, ctypes.c_int8)
        runtime.clear_log()
        status = api.llama_decode(self._context, batch)
        if status != 0:
            raise BackendError(
                f"llama_decode failed on {n} rows of the drafter with {status}: "
                f"{runtime.reason()}; load with a smaller n_ctx or without a drafter"
            )
        api.llama_synchronize(self._context)  # so that a caller's clock sees the work

    def logits(self, n: int) -> NDArray[np.float32]:
        """Logits of the last draft's n rows, float32 [n, n_vocab]; valid until the next call."""
        start = ctypes.cast(api.llama_get_logits(self._context), ctypes.c_void_p).value
        return _rows(start, n, self.n_vocab)

    def lattice(self, n: int) -> NDArray[np.float32]:
        """Selector rows of the last draft's n rows, float32 [n, n_embd]; valid until the next call.

        A row holds k candidate ids, then k times k scores: one for each candidate after each
        candidate of the position before. The anchor's row is empty.
        """
        return _rows(self._lattice(self.address), n, self.n_embd)

    def close(self) -> None:
        """Free context and model. Safe to call again."""
        context, self._context = self._context, None
        model, self._model = self._model, None
        if context:
            api.llama_free(context)
        if model:
            api.llama_model_free(model)


def _rows(start: int | None, n: int, width: int) -> NDArray[np.float32]:
    if not start:
        raise BackendError("llama.cpp gave no output for the drafter's last block")
    values = (ctypes.c_float * (n * width)).from_address(start)
    return np.ctypeslib.as_array(values).reshape(n, width)


def _function(names: tuple[str, ...], result: Any, *arguments: Any) -> Callable[..., Any]:
    for name in names[:-1]:
        try:
            return runtime.function(name, result, *arguments)
        except ImportError:
            continue
    return runtime.function(names[-1], result, *arguments)


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
