"""A drafter in llama.cpp's own `dflash` context: the oracle of the fused graph."""

import ctypes
import os
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import runtime
from dflash_local.target_model.taps import Features
from dflash_local.target_model.target import Target

# isort: split
import llama_cpp.llama_cpp as api

_set_lattice = api._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
_set_lattice.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
_get_lattice = api._lib["_Z26llama_get_embeddings_nextnP13llama_context"]
_get_lattice.argtypes, _get_lattice.restype = [ctypes.c_void_p], ctypes.c_void_p


class LlamaDrafter(Drafter):
    """DFlash, DFlash 2 and DSpark on the CPU, with a cache in f16.

    A draft is the path that the drafter itself prefers: each token is the best one after those
    before it. Only DFlash has candidates, as its positions do not depend on one another.
    """

    def __init__(self, path: Path, target: Target, *, n_seq: int, n_ctx: int) -> None:
        self.path = path
        self.spec = read_drafter(GgufFile.open(path), n_vocab=target.n_vocab)
        self._lengths = [0] * n_seq
        self._model = _model(path)
        self._n_vocab: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        n_rows = max(self.spec.block_size * n_seq, n_ctx)
        params = api.llama_context_default_params()
        params.n_ctx = n_ctx * n_seq + n_rows
        params.n_batch = params.n_ubatch = params.n_outputs_max = n_rows
        params.n_seq_max = n_seq
        params.n_threads = params.n_threads_batch = 1
        # llama.cpp finds out whether the device has it for these heads
        flash_attn = target.options.flash_attn
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_AUTO if flash_attn else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.type_k = params.type_v = int(GGMLQuantizationType.F16)
        params.kv_unified = True
        # A window that only keeps its last cells cannot be rolled back past them.
        params.swa_full = True
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        params.ctx_other = target.context
        self._context: Any = api.llama_init_from_model(self._model, params)
        assert self._context, runtime.reason()
        api.llama_set_causal_attn(self._context, self.spec.causal)
        self._memory = api.llama_get_memory(self._context)
        if self.spec.selector is not None:  # its rows are wanted instead of logits
            # A row for every token, even if it is not an output.
            _set_lattice(self._context, True, False)
        target.attach(self)

    @property
    def block_size(self) -> int:
        return self.spec.n_draft + 1

    @property
    def n_features(self) -> int:
        """Width of a context feature: taps times hidden size."""
        return self.spec.n_features

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def inject(self, seq: int, features: Features) -> None:
        n, begin = len(features), self._lengths[seq]
        if n:
            rows = np.ascontiguousarray(features, np.float32)
            kind = api.llama_model_rope_type(self._model)
            # M-RoPE: time, height, width; then nothing
            planes = np.zeros((4 if kind == api.LLAMA_ROPE_TYPE_MROPE else 1, n), np.int32)
            planes[:3] = np.arange(begin, begin + n)
            self._decode([seq] * n, planes, features=rows)
        self._lengths[seq] += n

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Decode a whole block per request, as the drafter was trained on, all in one batch."""
        for request in requests:
            self.inject(request.seq, request.features)
        size, seqs = self.spec.block_size, [request.seq for request in requests]
        masks = [self.spec.mask_token_id] * (size - 1)
        tokens = list(chain.from_iterable([request.anchor, *masks] for request in requests))
        begins = [self._lengths[seq] for seq in seqs]
        positions = list(chain.from_iterable(range(begin, begin + size) for begin in begins))
        in_rows = list(chain.from_iterable(repeat(seq, size) for seq in seqs))
        self._decode(in_rows, np.array(positions, np.int32), tokens=np.array(tokens, np.int32))
        drafts = [
            self._read(slice(i * size, (i + 1) * size), request.n_draft, len(tokens))
            for i, request in enumerate(requests)
        ]
        for seq in seqs:
            self.truncate(seq, self._lengths[seq])
        return drafts

    def _decode(
        self,
        seqs: Sequence[int],
        positions: NDArray[np.int32],
        *,
        tokens: NDArray[np.int32] | None = None,
        features: NDArray[np.float32] | None = None,
    ) -> None:
        """A pass over tokens, or over context features, which become keys and values."""
        n = len(seqs)
        # Rows of logits are read by their place in the batch, so all rows are outputs, or none.
        output = np.full(n, tokens is not None and self.spec.selector is None, np.int8)
        seq_ids, counts = np.asarray(seqs, np.int32), np.ones(n, np.int32)
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
        status = api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}: {runtime.reason()}"

    def truncate(self, seq: int, length: int) -> None:
        api.llama_memory_seq_rm(self._memory, seq, length, -1)
        self._lengths[seq] = min(length, self._lengths[seq])

    def copy(self, source: int, target: int, length: int) -> None:
        self.truncate(target, 0)
        api.llama_memory_seq_cp(self._memory, source, target, 0, length)
        self._lengths[target] = length

    def close(self) -> None:
        context, self._context = self._context, None
        if context:
            api.llama_free(context)
            api.llama_model_free(self._model)

    def _read(self, block: slice, n_draft: int, n_rows: int) -> Draft:
        if self.spec.selector is not None:
            start = _get_lattice(self._context)
            lattice = _rows(start, n_rows, api.llama_model_n_embd(self._model))[block]
            return _best_path(lattice[1 : 1 + n_draft], self.spec.selector.top_k)
        start = ctypes.cast(api.llama_get_logits(self._context), ctypes.c_void_p).value
        first = 0 if self.spec.sample_from_anchor else 1
        logits = _rows(start, n_rows, self._n_vocab)[block]
        logprobs = self._log_softmax(logits[first : first + n_draft])
        ids = logprobs.argmax(axis=1, keepdims=True).astype(np.int32)
        best = np.take_along_axis(logprobs, ids, axis=1)
        candidates = Candidates(ids, best) if self.spec.family == "dflash" else None
        return Draft.chain(ids[:, 0].tolist(), best[:, 0].tolist(), candidates)

    def _log_softmax(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        scales = self.spec.scales  # which llama.cpp leaves to the sampler
        if scales.logit:
            logits = logits * np.float32(scales.logit)
        if scales.logit_softcap:
            cap = np.float32(scales.logit_softcap)
            logits = np.tanh(logits / cap) * cap
        shifted = logits - logits.max(axis=1, keepdims=True)
        result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return result


def _best_path(lattice: NDArray[np.float32], top_k: int) -> Draft:
    """The chain that takes, position by position, the best successor of the token before.

    `lattice`, float32 [n, >= top_k * (top_k + 1)], has for each position the ids of `top_k`
    candidates, then their scores after each candidate of the position before. Log-probabilities are
    relative to the candidates.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    before = 0  # the first position has scores after the anchor only
    for row in lattice:
        begin = top_k * (1 + before)
        scores = row[begin : begin + top_k]
        before = int(scores.argmax())
        tokens.append(int(row[before]))
        logprobs.append(-float(np.log(np.exp(scores - scores[before]).sum())))
    return Draft.chain(tokens, logprobs)


def _model(path: Path) -> Any:
    runtime.init()
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    no_devices = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.addressof(no_devices)
    model = api.llama_model_load_from_file(os.fsencode(path), params)
    assert model, runtime.reason()
    return model


def _rows(start: int | None, n: int, width: int) -> NDArray[np.float32]:
    assert start, "llama.cpp gave no output for the drafter's last block"
    values = (ctypes.c_float * (n * width)).from_address(start)
    return np.ctypeslib.as_array(values).reshape(n, width)


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
