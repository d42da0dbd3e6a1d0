"""Heads in a file of their own as a drafter: Gemma 4's, which its makers call assistants."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.heads_drafter import HeadsDrafter, Rows, States
from dflash_local.errors import ContextFullError, FileError
from dflash_local.gguf.drafter_spec import AssistantSpec
from dflash_local.gguf.file import file_key
from dflash_local.llama import runtime
from dflash_local.llama.runtime import api
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.taps import Features, StoredFeatures
from dflash_local.target_model.target import Target


class AssistantDrafter(HeadsDrafter):
    """Drafts as `HeadsDrafter` does, with layers that have no cells of their own: they attend to
    the target's, in all steps of a draft from the anchor's position. Of a sequence it keeps the
    target's last hidden state.
    """

    name = "the assistant"
    _model: Any = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Target,
        spec: AssistantSpec,
        options: TargetOptions,
    ) -> None:
        """`options`: where its weights go; its context is like the target's. Raises FileError if
        llama.cpp cannot load it, BackendError if the memory does not suffice."""
        self.file_key = file_key(Path(path))
        runtime.clear_log()
        self._model = api.llama_model_load_from_file(os.fsencode(path), options.model_params())
        if not self._model:
            raise FileError(f"llama.cpp cannot load {os.fspath(path)}: {runtime.reason()}")
        self._open_on(target, spec, self._model, target.options, beside=target.context)

    def inject(self, seq: int, features: Features) -> None:
        text = self._texts[seq]
        text.length += len(features)
        if len(features):
            last = features
            if isinstance(features, StoredFeatures):
                last = StoredFeatures(features.target, features.rows[-1:])
            text.state = np.array(last, np.float32)[-1]

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        for request in requests:
            self.inject(request.seq, request.features)
        known = StoredFeatures(self._target, [])
        asked = [replace(request, features=known) for request in requests]
        # llama.cpp splits a batch of several streams, unless they lie side by side.
        together = [[each] for each in asked] if self._target.options.has_streams else [asked]
        draft = super().draft
        try:
            return [made for some in together for made in draft(some)]
        except ContextFullError:  # llama.cpp looks for a free cell of the target's for each row
            return [Draft.chain([], []) for _ in requests]

    def close(self) -> None:
        super().close()
        model, self._model = self._model, None
        if model:
            api.llama_model_free(model)

    def _next(self, seq: int, tokens: list[int], states: States) -> Rows:
        # llama.cpp refuses any other position than that behind the target's cells.
        begin = api.llama_memory_seq_pos_max(self._memory, seq) + 1
        return replace(super()._next(seq, tokens, states), begin=begin)

    def _after(self, rows: Rows, token: int, states: States) -> Rows:
        return Rows(rows.seq, rows.begin, [token], states)
