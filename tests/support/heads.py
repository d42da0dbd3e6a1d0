"""Targets whose files have heads that predict further tokens, and llama.cpp's own use of these."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
from numpy.typing import NDArray

import tiny_coder
from dflash_local.draft.assistant_drafter import AssistantDrafter
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.fused_heads import FusedHeads
from dflash_local.draft.heads_drafter import HeadsDrafter
from dflash_local.engine.engine import Engine
from dflash_local.fit.architectures import WayBack, way_back
from dflash_local.fit.pairing import check_heads, check_pair
from dflash_local.gguf.drafter_spec import AssistantSpec, HeadLayerSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from elsewhere import CHEAP, Elsewhere
from hybrid import write_assistant, write_hybrid
from pair_engine import Width, consistent
from plain_answer import PlainAnswer, asked_at_once

N = 32
"""Tokens of an answer."""


@contextmanager
def target_with_heads(path: Path, **options: Any) -> Iterator[Target]:
    """Exact to the bit, and ready for its heads."""
    file = GgufFile.open(path)
    spec = check_heads(file)
    wanted = {
        "n_ctx": 1024,
        "n_threads": 1,
        "n_batch": 64,
        "kv_type": "q8_0",
        "way_back": WayBack(way_back(file.architecture) or "cells", spec.n_draft),
        "tapped_layers": spec.target_layers,
        "heads": True,
        **options,
    }
    with Target(path, TargetOptions(**wanted)) as target:
        yield target


def heads_drafter(target: Target) -> HeadsDrafter:
    spec = check_heads(GgufFile.open(target.path))
    return HeadsDrafter(target, spec, n_seq=target.options.n_seq, n_ctx=target.n_ctx)


def fused_heads(target: Target) -> FusedHeads:
    spec = check_heads(GgufFile.open(target.path))
    assert isinstance(spec.layer, HeadLayerSpec)
    n_seq = target.options.n_seq
    return FusedHeads(target, spec, spec.layer, n_seq=n_seq, n_ctx=target.n_ctx)


@contextmanager
def target_of_assistant(path: Path, assistant: Path, **options: Any) -> Iterator[Target]:
    """Exact to the bit, and ready for an assistant."""
    spec = check_pair(GgufFile.open(path), GgufFile.open(assistant))
    wanted = {"n_ctx": 1024, "n_threads": 1, "n_batch": 64, "kv_type": "q8_0", **options}
    with Target(path, TargetOptions(tapped_layers=spec.target_layers, **wanted)) as target:
        yield target


def assistant_drafter(target: Target, path: Path) -> AssistantDrafter:
    spec = check_pair(GgufFile.open(target.path), GgufFile.open(path))
    assert isinstance(spec, AssistantSpec)
    return AssistantDrafter(path, target, spec, TargetOptions(n_ctx=256, n_threads=1))


TARGETS = {
    "an assistant, sometimes right": ("gemma4", 0.1),
    "always right": ("qwen35", 0.0),
    "sometimes right": ("qwen35", 0.02),
    "never right": ("qwen35", 1.0),
    "experts, sometimes right": ("qwen35moe", 0.02),
    "no recurrent layers": ("glm4moe", 0.02),
    "cut to outputs": ("qwen3next", 0.02),
    "latent attention": ("deepseek2", 0.02),
    "chosen tokens": ("deepseek32", 0.02),
    "chosen tokens of GLM": ("glm-dsa", 0.02),
    "latent, recurrent layers": ("bailingmoe3", 0.02),
    "sliding windows": ("step35", 0.02),
    "one matrix for attention": ("mimo2", 0.02),
    "snapshots": ("nemotron_h_moe", 0.02),
    "an assistant, always right": ("gemma4", 0.0),
    "an assistant, never right": ("gemma4", 1.0),
}
"""Architectures, and by how much their layers add to what their heads guess."""


class Files(dict[str, Path]):
    """Each target's, written when it is asked for, with its assistant beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        (architecture, added), path = TARGETS[name], self._folder / f"{len(self)}.gguf"
        self[name] = write_hybrid(path, architecture, tiny_coder.pair()[0], head=added)
        if architecture == "gemma4":
            write_assistant(path.with_suffix(".assistant.gguf"), path, added=added)
        return self[name]


def assistant_of(path: Path) -> Path | None:
    """The assistant of one of these targets, if its heads are in a file of their own."""
    found = path.with_suffix(".assistant.gguf")
    return found if found.exists() else None


@contextmanager
def target_with_any_heads(path: Path, **options: Any) -> Iterator[Target]:
    assistant = assistant_of(path)
    opened = target_of_assistant(path, assistant, **options) if assistant else None
    with opened or target_with_heads(path, **options) as target:
        yield target


def drafter_of(target: Target, graphed: bool = False) -> Drafter:
    """With its heads, in llama.cpp's context or in a graph of ours, or with its assistant."""
    assistant = assistant_of(target.path)
    if assistant:
        return assistant_drafter(target, assistant)
    return fused_heads(target) if graphed else heads_drafter(target)


def read(engine: Engine, text: list[int], seq: int = 0) -> StoredFeatures:
    """The target's states after a text, which is at most a batch."""
    engine.slots.forget_all()
    n = len(text)
    engine.target.decode(text, range(n), [seq] * n, [False] * n)
    return StoredFeatures(engine.target, list(engine.target.feature_rows), text)


def drafts(drafter: Drafter, anchor: int, features: StoredFeatures, seq: int = 0) -> list[int]:
    (draft,) = drafter.draft([DraftRequest(seq, anchor, features, 6, whole=True)])
    return draft.tokens


def check_one_answer(engine: Engine, width: Width, **sampling: Any) -> None:
    """Answers drafted at a width, or as a controller wants it, are the plain ones."""
    if width == "auto":
        engine.control(Elsewhere(CHEAP, block_size=engine.max_width))
    assert engine.drafter
    for text in tiny_coder.prompts()["code"][:2]:
        plain = PlainAnswer(engine.target, text, N, **sampling)
        found = plain.asked(engine, width)
        assert found.stats.drafted > 0
        consistent(engine, engine.drafter, len(plain.text) - 1)
        engine.slots.forget_all()


def check_four_at_once(engine: Engine, **sampling: Any) -> None:
    """The same of four."""
    texts = [*tiny_coder.prompts()["code"][:2], *tiny_coder.prompts()["chat"][:2]]
    known = [PlainAnswer(engine.target, text, N, **sampling) for text in texts]
    for found in asked_at_once(engine, known, (7, 4, 7, 2)):
        assert found.stats.drafted > 0


def drafts_of_llama_cpp(
    target: Target,
    tokens: Sequence[int],
    states: NDArray[np.float32],
    n: int,
    assistant: Path | None = None,
) -> list[int]:
    """The drafts of `llama-server` after `tokens`, of which the last one is the anchor: step by
    step, by the functions that its `draft-mtp` calls. `states`, [len(tokens) - 1, n_embd], are the
    target's after each token before the anchor. An assistant's cells are the target's, and all of
    its steps are at the same position."""
    params = target.options.context_params(1)
    params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
    model = ctypes.c_void_p(target.address)
    if assistant:
        params.ctx_other = target.context
        model = api.llama_model_load_from_file(
            str(assistant).encode(), api.llama_model_default_params()
        )
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_ext_init(context)
    before = np.concatenate([np.zeros((1, target.n_embd), np.float32), states])
    rows = list(zip(range(len(tokens)), tokens, before, strict=True))
    try:
        _set_nextn(context, True, True)
        for position, token, state in rows[: 0 if assistant else -1]:
            _row(context, batch, position, token, state, output=False)
        position, token, state = rows[-1]
        drafted = []
        for step in range(n):
            _row(context, batch, position + step * (not assistant), token, state, output=True)
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, 0), (target.n_vocab,))
            token = int(logits.argmax())
            state = np.ctypeslib.as_array(_nextn(context, 0), (target.n_embd,)).copy()
            drafted.append(token)
        return drafted
    finally:
        api.llama_batch_ext_free(batch)
        api.llama_free(context)
        if assistant:
            api.llama_model_free(model)


def _row(
    context: Any, batch: Any, position: int, token: int, state: NDArray[np.float32], *, output: bool
) -> None:
    api.llama_batch_ext_clear(batch)
    assert api.llama_batch_ext_add_token(batch, 0, token) == 0
    assert api.llama_batch_ext_set_pos(batch, 0, ctypes.byref(ctypes.c_int32(position)))
    row = np.ascontiguousarray(state, np.float32)
    data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    assert api.llama_batch_ext_set_embd_token(batch, 0, api.llama_embd(data, 1, len(row)))
    assert api.llama_batch_ext_set_output_logits(batch, 0, output)
    assert api.llama_process(context, api.LLAMA_PROCESS_TYPE_DECODE, batch) == 0


_set_nextn = api._lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
_set_nextn.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
_nextn = api._lib["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
_nextn.argtypes, _nextn.restype = [ctypes.c_void_p, ctypes.c_int32], ctypes.POINTER(ctypes.c_float)
