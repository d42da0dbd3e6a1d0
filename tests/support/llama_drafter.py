"""A drafter in llama.cpp's own `dflash` context: the oracle of the fused graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.taps import Features
from dflash_local.target_model.target import Target
from draft_context import DraftContext

# isort: split
import llama_cpp.llama_cpp as api


class LlamaDrafter(Drafter):
    """DFlash, DFlash 2 and DSpark on the CPU, with a cache in f16.

    A draft is the path that the drafter itself prefers: each token is the best one after those
    before it. Only DFlash has candidates, as its positions do not depend on one another.
    """

    def __init__(self, path: Path, target: Target, *, n_seq: int, n_ctx: int) -> None:
        self.path = path
        self.spec = read_drafter(GgufFile.open(path), n_vocab=target.n_vocab)
        self._lengths = [0] * n_seq
        n_rows = max(self.spec.block_size * n_seq, n_ctx)
        self._context = DraftContext(
            path,
            target.context,
            n_seq=n_seq,
            n_cells=n_ctx * n_seq + n_rows,
            n_rows=n_rows,
            n_threads=1,
            flash_attn=target.options.flash_attn,
            causal=self.spec.causal,
            lattice=self.spec.selector is not None,
        )
        self._memory = api.llama_get_memory(self._context._context)
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
            self._context.inject(rows, range(begin, begin + n), [seq] * n)
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
        self._context.draft(tokens, positions, in_rows)
        drafts = [
            self._read(slice(i * size, (i + 1) * size), request.n_draft, len(tokens))
            for i, request in enumerate(requests)
        ]
        for seq in seqs:
            self.truncate(seq, self._lengths[seq])
        return drafts

    def truncate(self, seq: int, length: int) -> None:
        api.llama_memory_seq_rm(self._memory, seq, length, -1)
        self._lengths[seq] = min(length, self._lengths[seq])

    def copy(self, source: int, target: int, length: int) -> None:
        self.truncate(target, 0)
        api.llama_memory_seq_cp(self._memory, source, target, 0, length)
        self._lengths[target] = length

    def close(self) -> None:
        self._context.close()

    def _read(self, block: slice, n_draft: int, n_rows: int) -> Draft:
        if self.spec.selector is not None:
            lattice = self._context.lattice(n_rows)[block]
            return _best_path(lattice[1 : 1 + n_draft], self.spec.selector.top_k)
        first = 0 if self.spec.sample_from_anchor else 1
        logprobs = self._log_softmax(self._context.logits(n_rows)[block][first : first + n_draft])
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
