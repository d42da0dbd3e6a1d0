"""Runs a drafter file in one static ggml graph, on the device of the target's head."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.graph_drafter import GraphDrafter
from dflash_local.errors import InputError
from dflash_local.fit.options import MAX_OUTPUT_ROWS
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import file_key
from dflash_local.llama import native
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import Target

TREE_TOP_K = 8
"""Candidates per position: as many as a tree of some dozens of nodes can use."""


class FusedDrafter(GraphDrafter[native.FusedDrafter]):
    """DFlash, DFlash 2 and DSpark. Shares the target's embeddings and head, if the file has none of
    its own. Its cache keeps each visible row in f16.

    The first candidates are the path that the drafter prefers: each is the best one after those
    before it.
    """

    gives_candidates = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Target,
        spec: DrafterSpec,
        *,
        n_seq: int,
        n_ctx: int,
        draft_window: int = 0,
        top_k: int = 1,
        n_threads: int | None = None,
    ) -> None:
        """`spec`: the contents of the file at `path`. `draft_window`: the number of a sequence's
        last rows that drafts look at; 0: all. Only these are kept, and a few more for rolling back.
        Raises FileError for a file that the graph cannot run, InputError for numbers out of range,
        BackendError if the memory does not suffice.
        """
        self.path = Path(path)
        self.file_key = file_key(self.path)
        self.draft_window = draft_window
        self.spec = spec
        self._target = target  # keeps the shared tensors alive
        with target.own_kernels():
            self._graph = native.FusedDrafter(
                target.address,
                target.native,
                os.fspath(path),
                spec,
                n_seq,
                n_ctx,
                top_k,
                n_threads or target.n_threads,
                draft_window,
                target.threads,
            )
        self.top_k = self._graph.top_k
        target.attach(self)

    @property
    def block_size(self) -> int:
        """One more than the most drafts. For DSpark, which also drafts at the anchor, that is one
        more than its file says."""
        return min(self.spec.n_draft + 1, MAX_OUTPUT_ROWS)

    @property
    def n_features(self) -> int:
        """Width of a context feature: taps times hidden size."""
        return self.spec.n_features

    @property
    def n_cache_bytes(self) -> int:
        """Size of the cache now. It grows with the context in use, up to the window."""
        return self._open.n_cache_bytes

    def inject(self, seq: int, features: Features) -> None:
        self._open.inject(seq, *self._rows([features]))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.begin(requests)
        return self.read()

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._begun = list(requests)
        if not requests:
            return
        n_draft = max(request.n_draft for request in requests)
        seqs = [request.seq for request in requests]
        anchors = [request.anchor for request in requests]
        features = self._rows([request.features for request in requests])
        self._open.begin(seqs, features, anchors, n_draft)

    def read(self) -> list[Draft]:
        if not self._begun:
            return []
        ids, logprobs, steps = self._open.read()
        drafts = []
        for i, request in enumerate(self._begun):
            part = i, slice(request.n_draft)
            after = None if steps is None else steps[part]
            known = Candidates(ids[part], logprobs[part], steps=after)
            firsts = known.ids[:, 0].tolist(), known.logprobs[:, 0].tolist()
            drafts.append(Draft.chain(*firsts, known))
        return drafts

    def n_visible(self, seq: int, length: int) -> int:
        return self._open.n_visible(seq, length)

    def _rows(self, features: Sequence[Features]) -> list[list[int]] | list[NDArray[np.float32]]:
        """Numbers in the target's store if all are there, else rows on the host."""
        stored = [
            rows.rows
            for rows in features
            if isinstance(rows, StoredFeatures) and rows.target is self._target
        ]
        return stored if len(stored) == len(features) else [self._on_host(f) for f in features]

    def _on_host(self, features: Features) -> NDArray[np.float32]:
        if features.ndim != 2 or features.shape[1] != self.n_features:
            raise InputError(
                f"context features of shape {features.shape}; expected [n, {self.n_features}]"
            )
        return np.ascontiguousarray(features, np.float32)
