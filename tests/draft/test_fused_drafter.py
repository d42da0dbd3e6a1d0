"""The native draft graph against the PyTorch reference and llama.cpp's own context, on random
weights of many shapes."""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_coder
from dflash_local.draft.drafter import DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.errors import ClosedError, ContextFullError
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from draft_twin import GPU_LAYERS, ROUNDING, Twin, TwinMaker, make_twin
from drafter_kinds import ALONE, COMMON
from llama_drafter import LlamaDrafter
from pair_engine import answer, fused_drafter, open_target
from plain_answer import plain_tokens
from reference import Reference

__all__ = ["make_twin"]


ALIKE = COMMON | ALONE
SHAPES: dict[str, Mapping[str, Any]] = ALIKE | {
    "1 tap, block of 4, 1 layer": {"block_size": 4, "n_layer": 1},
    "2 taps, block of 5, a head each": {
        "target_layers": (1, 4),
        "block_size": 5,
        "n_head": 2,
        "n_head_kv": 2,
        "head_dim": 32,
    },
    "4 taps, block of 8, wide heads": {
        "target_layers": (1, 2, 3, 5),
        "n_head": 6,
        "n_head_kv": 3,
        "head_dim": 40,
    },
    "5 taps, block of 16, 4 layers": {
        "target_layers": (1, 2, 3, 4, 5),
        "block_size": 16,
        "n_layer": 4,
        "n_embd": 96,
        "n_ff": 160,
        "head_dim": 8,
    },
    "block of 2": {"block_size": 2},
    "wide window inside the block": {"sliding_window": 5, "block_size": 16},
    "target with a head": {"tied": False},
    "from the anchor": {"extra": {"sample_from_anchor": True}, "block_size": 5},
    "biases": {"biases": ("q", "k", "v", "output"), "target_layers": (1, 2)},
    "biases but at the output": {"biases": ("q", "k", "v"), "sliding_window": 12},
    "biases and a scale of attention": {
        "biases": ("v", "output"),
        "extra": {"attention.value_scale": 0.5},
    },
    "scaled logits": {"extra": {"logit_scale": 1.5}},
    "attention sinks, a window and biases": {
        "sinks": True,
        "sliding_window": 12,
        "biases": ("q", "k", "v", "output"),
    },
    "values from keys of two taps": {"shared_kv": True, "target_layers": (1, 2)},
    "causal, window inside the block": {
        "extra": {"attention.causal": True},
        "sliding_window": 5,
        "block_size": 16,
    },
    "scales beside weights": {"scales": True, "own_head": True},
}
"""Options that llama.cpp knows as well, and others."""


def of_layer(layer: int, *parts: str) -> dict[str, str]:
    return {f"blk.{layer}.{part}.weight": "F16" for part in parts}


QKV = ("attn_q", "attn_k", "attn_v")
THREE: dict[str, Any] = {"n_layer": 3}
Q4_K: dict[str, Any] = {"quant": "Q4_K", "n_embd": 256, "head_dim": 64}
# F16 beside F32: their products round alike, so that the tolerance is that of one type.
MIXES: dict[str, dict[str, str]] = {
    "v of the first layer": of_layer(0, "attn_v"),
    "v of the last layer": of_layer(2, "attn_v"),
    "q and k of a layer between": of_layer(1, "attn_q", "attn_k"),
    "one layer": of_layer(1, *QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    "the first layer": of_layer(0, *QKV),
    "v of all layers": {k: t for i in range(3) for k, t in of_layer(i, "attn_v").items()},
    "up of a layer": of_layer(1, "ffn_up"),
    "gate of the first layer": of_layer(0, "ffn_gate"),
    "fc": {"fc.weight": "F16"},
}
BIASES: dict[str, tuple[str, ...]] = {
    "of a layer between": ("1.q", "1.k", "1.v"),
    "of the last layer": ("2.q", "2.k", "2.v"),
    "of the first layer": ("0.q", "0.k", "0.v"),
    "of two layers": ("0.q", "0.k", "0.v", "2.q", "2.k", "2.v"),
    "of q in all layers": ("q",),
    "of k and v in one layer": ("1.k", "1.v"),
}
WEIGHTS: dict[str, Mapping[str, Any]] = {
    **{f"F16, {name}": THREE | {"mixed": mixed} for name, mixed in MIXES.items()},
    **{f"biases {name}": THREE | {"biases": parts} for name, parts in BIASES.items()},
    "biases, and F16, v of a layer": THREE
    | {"mixed": of_layer(1, "attn_v"), "biases": ("q", "k", "v")},
    "biases, and F16, one layer": THREE
    | {"mixed": of_layer(0, *QKV), "biases": ("q", "k", "v", "output")},
    # As quantisers mix them: V of some layers in more bits than the rest.
    "quantised types": Q4_K
    | THREE
    | {"mixed": {"blk.0.attn_v.weight": "Q6_K", "blk.2.attn_v.weight": "Q8_0"}},
    **{
        quant: Q4_K | {"quant": quant, "target_layers": (1, 2)}
        for quant in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
    },
    # Vocabularies that divide into the pieces that a device searches, and others.
    **{
        f"{n_vocab} tokens, {top_k} of them": {"n_vocab": n_vocab, "top_k": top_k}
        for n_vocab, top_k in (*product((321, 333, 352, 384), (1, 8)), (320, 64), (320, 320))
    },
}
"""Weights that lie side by side where their types allow, and apart where not."""
EVERY = SHAPES | WEIGHTS


@pytest.mark.one_in(39)
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY.keys())
def test_equals_the_reference(options: Mapping[str, Any], make_twin: TwinMaker) -> None:
    twin = make_twin(**options)
    for n_rows in (0, 37, 3, 1, 0, 70):
        (draft,) = twin.draft({0: n_rows})
        assert draft.candidates is not None
        most = min(options.get("top_k", 16), options.get("reduced_vocabulary", 320))
        assert draft.candidates.ids.shape == (twin.native.block_size - 1, most)
    twin.reference.copy(0, 1, twin.reference.length(0) - 1)
    twin.assert_not(0, twin.reference.draft(1, anchor=11))


@pytest.mark.one_in(16)
@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE.keys())
def test_equals_llama_cpp(options: Mapping[str, Any], make_twin: TwinMaker) -> None:
    """It computes the same, in another order only. The reference is held to ours above."""
    twin = make_twin(n_ctx=256, top_k=1, **options)
    ours = twin.native
    theirs = LlamaDrafter(ours.path, ours._target, n_seq=1, n_ctx=256)
    assert ours.block_size == theirs.block_size
    for n_rows in (33, 7):
        rows = twin.features(n_rows)
        for drafter in (ours, theirs):
            drafter.inject(0, rows)
    n = ours.block_size - 1
    for anchor, n_rows in ((5, 0), (7, 4), (9, 6)):
        request = DraftRequest(0, anchor, twin.features(n_rows), n)
        (our,), (their,) = ours.draft([request]), theirs.draft([request])
        assert len(our) == len(their) == n
        assert our.candidates is not None and their.candidates is not None
        assert np.abs(our.candidates.logprobs - their.candidates.logprobs).max() < 1e-4
        assert (our.candidates.ids != their.candidates.ids).mean() < 0.1
        assert theirs.length(0) == ours.length(0)
    theirs.close()


@pytest.mark.slow
def test_the_shipped_pair_answers_as_without_and_accepts_as_in_llama_cpp() -> None:
    prompts = tiny_coder.prompts()
    prompts = prompts["chat"][:3] + prompts["code"][:3]
    path = tiny_coder.pair()[1]
    with open_target(tiny_coder.pair()[0]) as target:
        tokens = [target.vocabulary.tokenize(prompt) for prompt in prompts]
        plain = [plain_tokens(target, prompt, 96) for prompt in tokens]
        accepted = []
        for drafter in (fused_drafter(target), LlamaDrafter(path, target, n_seq=1, n_ctx=512)):
            engine = Engine(target, drafter)
            answers = [answer(engine, prompt, 16, 96) for prompt in tokens]
            assert [a.tokens for a in answers] == plain
            stats = [a.stats for a in answers]
            accepted.append(sum(s.emitted for s in stats) / sum(s.rounds for s in stats))
            engine.slots.forget_all()
            drafter.close()
    assert accepted[0] > 2.8
    assert accepted[1] == pytest.approx(accepted[0], rel=0.02)


@pytest.mark.parametrize("other", [-1, 1])
def test_the_window_is_exact_to_the_row(other: int, make_twin: TwinMaker) -> None:
    twin = make_twin(n_layer=3, sliding_window=12, pattern=(True, False, True))
    twin.draft({0: 40})
    twin.reference.sliding_window += other
    wrong = twin.reference.draft(0, anchor=11)
    twin.reference.sliding_window -= other
    twin.assert_not(0, wrong)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n_seq", [1, 2, 4])
def test_sequences_of_unequal_lengths_draft_at_once(n_seq: int, make_twin: TwinMaker) -> None:
    twin = make_twin(
        n_seq=n_seq, n_threads=2, target_layers=(1, 2), sliding_window=20, pattern=(True, False)
    )
    for seq, n_rows in zip(range(n_seq), (60, 7, 0, 133), strict=False):
        twin.inject(seq, n_rows)
    for n_new in ((3, 1, 8, 0), (0, 5, 0, 2), (0, 0, 0, 0), (30, 1, 16, 40)):
        twin.draft(dict(zip(range(n_seq), n_new, strict=False)))


@pytest.mark.parametrize("n_draft", [1, 2, 6])
def test_fewer_drafts_are_the_first_of_the_whole_block(n_draft: int, make_twin: TwinMaker) -> None:
    twin = make_twin(n_seq=2)
    twin.draft({0: 20, 1: 9}, n_draft)
    features = np.zeros((0, twin.reference.feature_size), np.float32)
    requests = [DraftRequest(0, 4, features, n_draft), DraftRequest(1, 4, features, 7)]
    for draft, request in zip(twin.native.draft(requests), requests, strict=True):
        assert len(draft) == request.n_draft
        expected = twin.reference.draft(request.seq, 4)[: request.n_draft]
        twin.check(draft, expected, twin.noise(request.seq))


@pytest.mark.slow
def test_small_injections_equal_a_large_one(make_twin: TwinMaker) -> None:
    twin = make_twin(n_seq=3, n_ctx=1200, target_layers=(1, 2))
    features = twin.features(1100)
    twin.reference.inject(0, features)
    expected = twin.reference.draft(0, anchor=5)
    twin.native.inject(0, features)
    sizes = (1, 2, 5, 16, 17, 64, 65, 100, 129, 256, 300)
    for end, n_rows in zip(np.cumsum(sizes), sizes, strict=True):
        twin.native.inject(1, features[end - n_rows : end])
    for i in range(0, 150, 3):
        twin.native.draft([DraftRequest(2, 5, features[i : i + 3], 2)])
    nothing = features[:0]
    twin.native.inject(1, features[sum(sizes) :])
    twin.native.inject(2, features[150:1000])
    requests = [
        DraftRequest(0, 5, nothing, 7),
        DraftRequest(1, 5, nothing, 7),
        DraftRequest(2, 5, features[1000:], 7),
    ]
    for draft in twin.native.draft(requests):
        twin.check(draft, expected, twin.noise(0))


def test_the_cache_grows_with_the_context(make_twin: TwinMaker) -> None:
    twin = make_twin(n_seq=2, n_ctx=3000, n_head=2, n_head_kv=1, block_size=16)
    twin.inject(1, 100)
    n_bytes = [twin.native.n_cache_bytes]
    for length in (240, 241, 255, 256, 700, 1020, 1500, 2100, 2999, 3000):
        twin.draft({0: length - twin.native.length(0), 1: 1})
        n_bytes.append(twin.native.n_cache_bytes)
    assert n_bytes == sorted(n_bytes)
    assert len(set(n_bytes)) > 2
    f16, both = 2, 2
    assert n_bytes[-1] < both * 2 * f16 * 2 * 16 * (3000 + 1024)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n_ctx", [40, 240, 256, 1000])
def test_the_last_positions_of_the_context(n_ctx: int, make_twin: TwinMaker) -> None:
    twin = make_twin(n_ctx=n_ctx, n_seq=2, block_size=16)
    twin.inject(0, n_ctx - 5)
    twin.inject(1, n_ctx // 2)
    for n_rows in (2, 2, 1, 0):
        twin.draft({0: n_rows, 1: 1})
    assert twin.native.length(0) == n_ctx
    twin.draft({1: 1})


@pytest.mark.parametrize("n_ctx", [40, 256, 1100])
def test_beyond_the_context_is_an_error_that_changes_nothing(
    n_ctx: int, make_twin: TwinMaker
) -> None:
    twin = make_twin(n_ctx=n_ctx, n_seq=2)
    twin.inject(0, n_ctx - 2)
    twin.inject(1, 9)
    lengths = n_ctx - 2, 9
    for n_rows in (3, 100, 5000):
        with pytest.raises(ContextFullError, match=str(n_ctx)):
            twin.native.inject(0, twin.features(n_rows))
        requests = [
            DraftRequest(1, 5, twin.features(2), 7),
            DraftRequest(0, 5, twin.features(n_rows), 7),
        ]
        with pytest.raises(ContextFullError, match=str(n_ctx)):
            twin.native.draft(requests)
        assert (twin.native.length(0), twin.native.length(1)) == lengths
    twin.draft({0: 0, 1: 0})
    twin.draft({0: 2, 1: 1})


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history_leaves_what_its_calls_say(data: st.DataObject, history_twin: Twin) -> None:
    twin = history_twin
    twin.restart()
    sequences = st.integers(0, 2)
    for _ in range(data.draw(st.integers(1, 8), "calls")):
        call = data.draw(st.sampled_from(["inject", "draft", "truncate", "copy"]), "call")
        seq = data.draw(sequences, "seq")
        length = twin.native.length(seq)
        if call == "inject":
            twin.inject(seq, data.draw(st.integers(0, 90 - length), "rows"))
        elif call == "draft":
            rows = {}
            for each in data.draw(st.lists(sequences, min_size=1, unique=True), "sequences"):
                room = 90 - twin.native.length(each)
                rows[each] = data.draw(st.integers(0, min(room, 9)), "rows")
            twin.draft(rows)
        elif call == "truncate":
            twin.truncate(seq, data.draw(st.integers(0, length), "length"))
        else:
            twin.copy(seq, data.draw(sequences, "to"), data.draw(st.integers(0, length), "length"))
    twin.draft({0: 0, 1: 0, 2: 0})


@pytest.fixture(scope="module")
def history_twin(make_twin: TwinMaker) -> Twin:
    return make_twin(n_ctx=90, n_seq=3, sliding_window=16, pattern=(True, False), block_size=5)


@pytest.mark.slow
def test_hidden_states_of_the_shipped_pair_draft_as_in_the_reference() -> None:
    target_path, drafter_path = tiny_coder.pair()
    reference = Reference(drafter_path, target_path, cache_dtype=torch.float16)
    text = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a"
    options = {"n_ctx": 256, "n_threads": 1, "n_gpu_layers": GPU_LAYERS}
    with Target.load(target_path, tapped_layers=(2, 4, 6), **options) as target:
        drafter = open_drafter(drafter_path, target, n_seq=1, n_ctx=256, n_threads=1)
        tokens = target.vocabulary.tokenize(text)
        n = len(tokens) - 1
        target.decode(tokens[:n], range(n), [0] * n, [False] * n)
        features = target.hidden_states().reshape(n, -1)
        reference.inject(0, features)
        expected = reference.draft(0, tokens[n])
        (draft,) = drafter.draft([DraftRequest(0, tokens[n], features, 15)])
    # As `Twin.noise` for three layers in Q8_0, with logits as far apart as training made them.
    noise = float(expected.std()) * math.sqrt(23) * ROUNDING["Q8_0"]
    Twin.check(draft, expected, noise)


def test_bad_requests_are_refused(make_twin: TwinMaker) -> None:
    twin = make_twin(n_seq=2)
    twin.inject(0, 20)
    nothing = twin.features(0)
    bad = [
        [DraftRequest(2, 5, nothing, 7)],
        [DraftRequest(-1, 5, nothing, 7)],
        [DraftRequest(0, 320, nothing, 7)],
        [DraftRequest(0, -1, nothing, 7)],
        [DraftRequest(0, 5, nothing, 8)],
        [DraftRequest(0, 5, nothing, 0)],
        [DraftRequest(0, 5, np.zeros((3, 63), np.float32), 7)],
        [DraftRequest(0, 5, nothing, 7), DraftRequest(0, 6, nothing, 7)],
    ]
    for requests in bad:
        with pytest.raises(ValueError, match=r"\d"):
            twin.native.draft(requests)
    with pytest.raises(ValueError, match="21"):
        twin.native.copy(0, 1, 21)
    with pytest.raises(ValueError, match="-1"):
        twin.native.truncate(0, -1)
    assert (twin.native.length(0), twin.native.length(1)) == (20, 0)
    twin.draft({0: 1, 1: 0})


def test_a_closed_drafter_says_so(make_twin: TwinMaker) -> None:
    twin = make_twin()
    twin.native.close()
    twin.native.close()
    with pytest.raises(ClosedError, match="closed"):
        twin.native.length(0)
