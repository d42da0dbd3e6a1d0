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
from dflash_local import Model
from dflash_local.draft.assistant_drafter import AssistantDrafter
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.fused_heads import FusedHeads
from dflash_local.draft.heads_drafter import HeadsDrafter
from dflash_local.engine.engine import Engine
from dflash_local.fit.architectures import WayBack, way_back
from dflash_local.fit.pairing import check_heads, check_pair
from dflash_local.gguf.drafter_spec import AssistantSpec, HeadLayerSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.prefixes.store import PrefixStore
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from elsewhere import MACHINES, Elsewhere, controller
from long_text import PYTHON_SOURCE
from pair_engine import Width, answer, consistent, request
from plain_answer import PlainAnswer

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


def read(engine: Engine, text: list[int], seq: int = 0) -> StoredFeatures:
    """The target's states after a text, which is at most a batch."""
    engine.slots.forget_all()
    n = len(text)
    engine.target.decode(text, range(n), [seq] * n, [False] * n)
    return StoredFeatures(engine.target, list(engine.target.numbers), text)


def drafts(drafter: Drafter, anchor: int, features: StoredFeatures, seq: int = 0) -> list[int]:
    (draft,) = drafter.draft([DraftRequest(seq, anchor, features, 6, whole=True)])
    return draft.tokens


def share_accepted(engine: Engine) -> float:
    """Of the drafts in some answers."""
    stats = [answer(engine, [t, t + 1, t + 2], 7, N).stats for t in range(1000, 5000, 500)]
    return sum(s.accepted for s in stats) / sum(s.drafted for s in stats)


def check_one_answer(engine: Engine, width: Width, **sampling: Any) -> int:
    """Answers drafted at a width, or as a controller wants it, are the plain ones. Returns how many
    drafts were accepted."""
    if width == "auto":
        engine.control(controller("cheap"))
    assert engine.drafter
    n_accepted = 0
    for text in tiny_coder.prompts()["code"][:2]:
        plain = PlainAnswer(engine.target, text, N, **sampling)
        found = plain.asked(engine, width)
        assert found.stats.drafted > 0
        n_accepted += found.stats.accepted
        consistent(engine, engine.drafter, len(plain.text) - 1)
        engine.slots.forget_all()
    return n_accepted


def check_at_once(
    engine: Engine, known: list[PlainAnswer], widths: tuple[int, ...], **sampling: Any
) -> None:
    """Answers at once, drafted at several widths, are the plain ones."""
    answers = [
        engine.begin(request(plain.prompt, width, len(plain.tokens), **sampling))
        for plain, width in zip(known, widths, strict=True)
    ]
    engine.run(answers)
    for found, plain in zip(answers, known, strict=True):
        assert found.error is None and found.stats.warning is None
        assert found.tokens == plain.tokens
        assert found.stats.drafted > 0


def check_four_at_once(engine: Engine, **sampling: Any) -> list[PlainAnswer]:
    """The same of four, which are returned."""
    texts = [*tiny_coder.prompts()["code"][:2], *tiny_coder.prompts()["chat"][:2]]
    known = [PlainAnswer(engine.target, text, N, **sampling) for text in texts]
    check_at_once(engine, known, (7, 4, 7, 2), **sampling)
    return known


def check_drafts(engine: Engine, assistant: Path | None = None) -> None:
    """They are llama.cpp's, with the whole text at once, in pieces, and after drafts that were
    rejected. An assistant's window is shorter than the text."""
    target, drafter = engine.target, engine.drafter
    assert drafter
    text = target.vocabulary.tokenize(PYTHON_SOURCE)[:50]
    features = read(engine, text)
    states = np.asarray(features)
    expected = drafts_of_llama_cpp(target, [*text, 300], states, 6, assistant)
    assert drafts(drafter, 300, features) == expected
    assert drafts(drafter, 300, StoredFeatures(target, [])) == expected
    other = drafts_of_llama_cpp(target, [*text, 301], states, 6, assistant)
    assert drafts(drafter, 301, StoredFeatures(target, [])) == other
    drafter.truncate(0, 0)
    for begin, end in ((0, 1), (1, 30), (30, 44)):
        drafter.inject(0, StoredFeatures(target, features.rows[begin:end], text[begin:end]))
    rest = StoredFeatures(target, features.rows[44:], text[44:])
    assert drafts(drafter, 300, rest) == expected
    assert drafter.length(0) == len(text)


def check_shared_and_saved(engine: Engine) -> None:
    """Copied to another sequence, saved, and restored in a third, a text has the same drafts."""
    target, drafter = engine.target, engine.drafter
    assert isinstance(drafter, AssistantDrafter | HeadsDrafter)
    text = target.vocabulary.tokenize(PYTHON_SOURCE)[:40]
    expected = drafts(drafter, 300, read(engine, text))
    none = StoredFeatures(target, [])
    for seq in (2, 3) if isinstance(drafter, AssistantDrafter) else ():
        target.copy(0, seq, len(text))  # whose cells it reads
    drafter.copy(0, 2, len(text))
    assert drafts(drafter, 300, none, 2) == expected
    saved = drafter.save(2)
    drafter.truncate(2, 0)
    drafter.truncate(0, 7)
    drafter.restore(3, saved)
    assert [drafter.length(seq) for seq in range(4)] == [7, 0, 0, len(text)]
    assert drafts(drafter, 300, none, 3) == expected


def check_a_text_goes_on(target: Target, drafter: Drafter) -> None:
    """In its slot, cut back in it, and after it has left the slot."""
    engine = Engine(target, drafter, 1, store=PrefixStore(64 << 20))
    engine.slots.forget_all()
    first = PlainAnswer(target, PYTHON_SOURCE[:500], N)
    turn = target.vocabulary.tokenize("\n\ndef add(a, b):")
    second = PlainAnswer(target, [*first.text, *turn], N)
    third = PlainAnswer(target, [*first.prompt[:-9], *turn], N)
    engine.slots.forget_all()
    for plain in (first, second, third, second, first):
        found = answer(engine, plain.prompt, 7, N)
        # The last bits of a recurrent state may differ after a checkpoint.
        assert target.is_recurrent or found.tokens == plain.tokens
        assert found.error is None
        assert found.stats.drafted > 0
        consistent(engine, drafter, len(engine.slots[0].cached))


def check_put_off(model: Model) -> None:
    """Drafts that are never right, on a made-up machine: what this one takes for a pass depends on
    what else it does."""
    plain = model.generate("def add(", max_tokens=3 * N, draft_width=0)
    model.engine.control(Elsewhere(MACHINES["even"], block_size=model.engine.max_width))
    drafted = []
    for _ in range(3):
        model.forget()
        found = model.generate("def add(", max_tokens=3 * N)
        assert found.tokens == plain.tokens
        drafted.append(found.stats.drafted)
    assert found.stats.drafting and found.stats.drafting.startswith("drafting is off")
    assert 0 < drafted[0] < N > 10 * drafted[2]


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
