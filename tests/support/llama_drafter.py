"""A drafter in llama.cpp's own `dflash` context: the oracle of the fused graph."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.errors import BackendError, ClosedError, ContextFullError, FileError, InputError
from dflash_local.fit.options import MAX_IDS, MAX_OUTPUT_ROWS
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile, file_key
from dflash_local.target import sequence_state
from dflash_local.target.options import TargetOptions
from dflash_local.target.taps import Features
from dflash_local.target.target import Target
from dflash_local.trial.draft_context import ContextOptions, DraftContext

# isort: split
import llama_cpp.llama_cpp as api

_ALL_LAYERS = 999
_MAX_ROWS = 1 << 24
_ROWS = 128  # of one batch: it computes logits for all of them


def open_llama_drafter(path: str | os.PathLike[str], target: Target, **sizes: Any) -> LlamaDrafter:
    """As `loading.open_drafter`."""
    spec = read_drafter(GgufFile.open(path), n_vocab=target.n_vocab)
    return LlamaDrafter(path, target, spec, **sizes)


class LlamaDrafter(Drafter):
    """DFlash, DFlash 2 and DSpark, on the target's devices, with a cache in f16.

    Shares the target's embeddings and head if the file has none of its own. A draft is the path
    that the drafter itself prefers: each token is the best one after those before it. Only DFlash
    has candidates, as its positions do not depend on one another.
    """

    saves_rows = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Target,
        spec: DrafterSpec,
        *,
        n_seq: int,
        n_ctx: int,
        draft_window: int = 0,
        n_threads: int | None = None,
    ) -> None:
        """`spec`: what the file at `path` says. The file has passed its trial: llama.cpp aborts on
        some bad ones. `draft_window`: how many of a sequence's last rows are kept; 0: all. Raises
        FileError for a drafter of another target, InputError for numbers out of range, BackendError
        if the memory does not suffice.
        """
        if not 1 <= n_seq <= MAX_IDS:
            raise InputError(f"n_seq is {n_seq}, expected 1 to {MAX_IDS}")
        if not 1 <= n_ctx <= _MAX_ROWS:
            raise InputError(f"n_ctx is {n_ctx}, expected 1 to {_MAX_ROWS}")
        if draft_window < 0:
            raise InputError(f"draft_window is {draft_window}, expected 0 or more")
        self.path = Path(path)
        self.file_key = file_key(self.path)
        self.draft_window = draft_window
        self.spec = spec
        self._n_rows = max(spec.block_size, _ROWS)
        self._check_target(target)
        self._target = target  # its context outlives ours
        self._n_ctx = n_ctx
        self._window = min(draft_window, n_ctx) or n_ctx
        self._lengths = [0] * n_seq
        self._context = CachedContext(
            path,
            target,
            ContextOptions(
                n_seq=n_seq,
                n_cells=self._window * n_seq + self._n_rows,
                n_rows=self._n_rows,
                n_threads=n_threads or target.n_threads,
                flash_attn=target.options.flash_attn,
                causal=spec.causal,
                lattice=spec.selector is not None,
            ),
        )
        if self._context.options.n_threads <= target.n_threads:
            target.threads.attach(self._context.address)
        if self._context.n_vocab != target.n_vocab:
            n_vocab = self._context.n_vocab
            self.close()
            raise FileError(
                f"{self.path} has {n_vocab} tokens, the target {target.n_vocab}; take the drafter "
                "of this target"
            )
        target.attach(self)

    def _check_target(self, target: Target) -> None:
        for name, ours, theirs in (
            ("hidden size", self.spec.n_embd, target.n_embd),
            ("vocabulary size", self.spec.n_vocab, target.n_vocab),
        ):
            if ours != theirs:
                raise FileError(
                    f"{self.path}: the {name} is {ours}, that of the target {theirs}; take the "
                    "drafter of this target"
                )

    @property
    def block_size(self) -> int:
        """One more than the most drafts. For DSpark, which also drafts at the anchor, that is one
        more than its file says."""
        return min(self.spec.n_draft + 1, MAX_OUTPUT_ROWS)

    @property
    def n_features(self) -> int:
        """Width of a context feature: taps times hidden size."""
        return self.spec.n_taps * self.spec.n_embd

    def length(self, seq: int) -> int:
        self._check_sequence(seq)
        return self._lengths[seq]

    def inject(self, seq: int, features: Features) -> None:
        self._check_sequence(seq)
        rows = self._rows(features)
        self._check_room(seq, len(rows))
        with self._all_or_nothing([seq]):
            self._inject([(seq, rows)])

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        rows = self._check_requests(requests)
        seqs = [request.seq for request in requests]
        drafts: list[Draft] = []
        with self._all_or_nothing(seqs):
            self._inject(list(zip(seqs, rows, strict=True)))
            at_once = self._n_rows // self.spec.block_size
            for begin in range(0, len(requests), at_once):
                drafts += self._denoise(requests[begin : begin + at_once])
        return drafts

    def truncate(self, seq: int, length: int) -> None:
        self._check_sequence(seq)
        if length < 0:
            raise InputError(f"cannot truncate a sequence to {length} rows; expected 0 or more")
        self._cut(seq, min(length, self._lengths[seq]))

    def copy(self, source: int, target: int, length: int) -> None:
        self._check_sequence(source)
        self._check_sequence(target)
        if not 0 <= length <= self._lengths[source]:
            raise InputError(
                f"cannot copy {length} rows of sequence {source}, which has {self._lengths[source]}"
            )
        if source == target:
            self._cut(target, length)
            return
        self._cut(target, 0)
        if length:
            self._context.copy(source, target, length)
            self._lengths[target] = length

    def save(self, seq: int) -> NDArray[np.uint8]:
        """As `Drafter.save`. Of layers with a sliding window only the window is saved."""
        self._check_sequence(seq)
        length = np.array([self._lengths[seq]], "<i4").view(np.uint8)
        return np.concatenate([length, self._context.save(seq)])

    def restore(self, seq: int, saved: NDArray[np.uint8]) -> None:
        self._check_sequence(seq)
        length = int(saved[:4].view("<i4")[0]) if len(saved) >= 4 else -1
        if not 0 <= length <= self._n_ctx:
            raise InputError(f"{len(saved)} saved bytes are not rows of this drafter")
        self._cut(seq, 0)
        if length and not self._context.restore(seq, saved[4:]):
            raise InputError(f"{length} saved rows do not fit this drafter's cache")
        self._lengths[seq] = length

    def n_visible(self, seq: int, length: int) -> int:
        if self._window == self._n_ctx:
            return length
        first = max(self._context.first(seq), 0)
        return max(0, length - max(first, length - self._window))

    def close(self) -> None:
        self._context.close()

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            self.close()

    # One pass of the drafter

    def _inject(self, work: Sequence[tuple[int, NDArray[np.float32]]]) -> None:
        work = [(seq, rows) for seq, rows in work if len(rows)]
        if not work:
            return
        features = work[0][1] if len(work) == 1 else np.concatenate([rows for _, rows in work])
        seqs = list(chain.from_iterable([seq] * len(rows) for seq, rows in work))
        starts = {seq: self._lengths[seq] for seq, _ in work}
        positions = list(
            chain.from_iterable(range(starts[s], starts[s] + len(rows)) for s, rows in work)
        )
        step = self._n_rows
        for begin in range(0, len(features), step):
            part = slice(begin, begin + step)
            self._context.inject(features[part], positions[part], seqs[part])
            if self._window < self._n_ctx:
                for seq, position in dict(zip(seqs[part], positions[part], strict=True)).items():
                    self._context.forget(seq, position + 1 - self._window)
        for seq, rows in work:
            self._lengths[seq] += len(rows)

    def _denoise(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Decode a whole block per request, as the drafter was trained on, all in one batch."""
        size = self.spec.block_size
        tokens: list[int] = []
        positions: list[int] = []
        seqs: list[int] = []
        for request in requests:
            begin = self._lengths[request.seq]
            tokens += [request.anchor] + [self.spec.mask_token_id] * (size - 1)
            positions += range(begin, begin + size)
            seqs += [request.seq] * size
        try:
            self._context.draft(tokens, positions, seqs)
            return [
                self._read(slice(i * size, (i + 1) * size), request.n_draft, len(tokens))
                for i, request in enumerate(requests)
            ]
        finally:
            for request in requests:
                self._context.remove(request.seq, self._lengths[request.seq])

    def _read(self, block: slice, n_draft: int, n_rows: int) -> Draft:
        if self.spec.selector is not None:
            lattice = self._context.lattice(n_rows)[block]
            return best_path(lattice[1 : 1 + n_draft], self.spec.selector.top_k)
        first = 0 if self.spec.sample_from_anchor else 1
        logits = self._context.logits(n_rows)[block][first : first + n_draft]
        logprobs = self._log_softmax(logits)
        ids = logprobs.argmax(axis=1, keepdims=True).astype(np.int32)
        best = np.take_along_axis(logprobs, ids, axis=1)
        candidates = Candidates(ids, best) if self.spec.family == "dflash" else None
        return Draft.chain(ids[:, 0].tolist(), best[:, 0].tolist(), candidates)

    def _log_softmax(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        scales = self.spec.scales
        if scales.logit:
            logits = logits * np.float32(scales.logit)
        if scales.logit_softcap:
            cap = np.float32(scales.logit_softcap)
            logits = np.tanh(logits / cap) * cap
        peaks = logits.max(axis=1, keepdims=True)
        if not np.isfinite(peaks).all():
            raise _no_number()
        shifted = logits - peaks
        result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return result

    # Checks

    @contextmanager
    def _all_or_nothing(self, seqs: Sequence[int]) -> Iterator[None]:
        before = [self._lengths[seq] for seq in seqs]
        try:
            yield
        except BaseException:
            for seq, length in zip(seqs, before, strict=True):
                self._cut(seq, length)
            raise

    def _cut(self, seq: int, length: int) -> None:
        self._context.remove(seq, length)
        self._lengths[seq] = length

    def _check_requests(self, requests: Sequence[DraftRequest]) -> list[NDArray[np.float32]]:
        """The features of each request. Raises before anything is changed."""
        seen: set[int] = set()
        rows = []
        for request in requests:
            self._check_sequence(request.seq)
            if request.seq in seen:
                raise InputError(f"sequence {request.seq} is asked to draft twice at once")
            seen.add(request.seq)
            if not 1 <= request.n_draft <= self.spec.n_draft:
                raise InputError(
                    f"cannot draft {request.n_draft} tokens; this drafter's block allows 1 to "
                    f"{self.spec.n_draft}"
                )
            if not 0 <= request.anchor < self.spec.n_vocab:
                raise InputError(f"token {request.anchor} is not in 0 to {self.spec.n_vocab - 1}")
            rows.append(self._rows(request.features))
            self._check_room(request.seq, len(rows[-1]))
        return rows

    def _check_sequence(self, seq: int) -> None:
        if not self._context.is_open:
            raise ClosedError("this drafter is closed; load it again")
        if not 0 <= seq < len(self._lengths):
            raise InputError(f"sequence {seq} is not in 0 to {len(self._lengths) - 1}")

    def _check_room(self, seq: int, n: int) -> None:
        wanted = self._lengths[seq] + n
        if wanted > self._n_ctx:
            raise ContextFullError(
                f"the drafter's cache holds {self._n_ctx} rows, asked for {wanted}; load with a "
                "larger context"
            )

    def _rows(self, features: Features) -> NDArray[np.float32]:
        if features.ndim != 2 or features.shape[1] != self.n_features:
            raise InputError(
                f"context features of shape {features.shape}; expected [n, {self.n_features}]"
            )
        rows = np.ascontiguousarray(features, np.float32)
        if not np.isfinite(rows).all():
            # A NaN in a cell would spoil later drafts, too: zero times NaN is NaN.
            raise BackendError(
                "hidden states of the target are not finite, nothing can be drafted from them; "
                "load without a drafter to see what the target puts out"
            )
        return rows


class CachedContext(DraftContext):
    """A `DraftContext` on the target's devices whose cells can be cut, shared and saved."""

    def __init__(
        self, path: str | os.PathLike[str], target: Target, options: ContextOptions
    ) -> None:
        self._beside = target.options
        super().__init__(path, target.context, options)
        self._memory = api.llama_get_memory(self._context)

    def _place(self, params: Any) -> Any:
        """As `TargetOptions` has it; the drafter goes to the last GPU."""
        beside: TargetOptions = self._beside
        if not beside.n_gpu_layers:
            return super()._place(params)
        params.n_gpu_layers = _ALL_LAYERS
        params.main_gpu = beside.main_gpu
        if beside.split_mode == "none":
            params.split_mode = api.LLAMA_SPLIT_MODE_NONE
            return None
        # The head is shared, and with it the device: the last that has layers.
        params.split_mode = api.LLAMA_SPLIT_MODE_LAYER
        shares = list(beside.tensor_split or ())
        used = [i for i, share in enumerate(shares) if share > 0]
        if not used:
            return None
        split = (ctypes.c_float * api.llama_max_devices())()
        split[used[-1]] = 1.0
        params.tensor_split = split
        return split

    @property
    def is_open(self) -> bool:
        return self._context is not None

    def remove(self, seq: int, start: int) -> None:
        """Forget positions `start` and up."""
        api.llama_memory_seq_rm(self._memory, seq, start, -1)

    def forget(self, seq: int, end: int) -> None:
        """Forget positions before `end`, which may be negative."""
        if end > 0 and not api.llama_memory_seq_rm(self._memory, seq, 0, end):
            raise InputError("llama.cpp keeps all rows of this drafter; load without draft_window")

    def copy(self, source: int, target: int, length: int) -> None:
        """Let sequence `target`, which is empty, share the first `length` positions of `source`."""
        api.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def first(self, seq: int) -> int:
        """The first position that a sequence has; -1 if it is empty."""
        return int(api.llama_memory_seq_pos_min(self._memory, seq))

    def save(self, seq: int) -> NDArray[np.uint8]:
        """The rows of a sequence as bytes, uint8 [n]. See `target.sequence_state`."""
        return sequence_state.save(self._context, seq)

    def restore(self, seq: int, state: NDArray[np.uint8]) -> bool:
        """Replace the rows of a sequence by saved ones. If they do not fit: False, it is empty."""
        return sequence_state.restore(self._context, seq, state)


def best_path(lattice: NDArray[np.float32], top_k: int) -> Draft:
    """The chain that takes, position by position, the best successor of the token before.

    `lattice`, float32 [n, >= top_k * (top_k + 1)], has for each position the ids of `top_k`
    candidates, then their scores after each candidate of the position before. Log-probabilities are
    relative to the candidates. Raises BackendError for scores that are not numbers.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    before = 0  # the first position has scores after the anchor only
    for row in lattice:
        begin = top_k * (1 + before)
        scores = row[begin : begin + top_k]
        before = int(scores.argmax())
        peak = scores[before]
        if not np.isfinite(peak):
            raise _no_number()
        tokens.append(int(row[before]))
        logprobs.append(-float(np.log(np.exp(scores - peak).sum())))
    return Draft.chain(tokens, logprobs)


def _no_number() -> BackendError:
    return BackendError(
        "the drafter's output is not a number; fetch its file again, or load without a drafter"
    )
