"""The drafter over llama.cpp's own context: the oracle of the fused graph, and right by itself."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_local import demo
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError, ClosedError, ContextFullError, InputError
from dflash_local.loading import open_drafter
from dflash_local.target.target import Target
from drafter_kinds import ALONE, CAPPED, COMMON, DFLASH2, DSPARK, FAMILIES
from gguf_files import changed, spoil
from llama_drafter import LlamaDrafter, best_path, open_llama_drafter
from pair_engine import answer, open_target, plain_tokens
from reference import Reference
from synthetic import write_drafter, write_target

torch.set_num_threads(1)  # the products are small

# Keys and values are halves: of an F32 drafter, log-probabilities differ by at most half of this.
NOISE = 0.02
# The fused graph computes the same, in another order only.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=5)
    with Target.load(path, n_ctx=512, n_threads=1, n_seq=4, tapped_layers=(1,)) as loaded:
        yield loaded


def opened(
    folder: Path,
    target: Target,
    options: Mapping[str, Any],
    *,
    n_seq: int = 1,
    n_ctx: int = 256,
) -> LlamaDrafter:
    """A random drafter with these options."""
    path = write_drafter(folder / "drafter.gguf", target.path, **options)
    return open_llama_drafter(path, target, n_seq=n_seq, n_ctx=n_ctx, n_threads=1)


def features(n: int, drafter: LlamaDrafter, seed: int = 0) -> NDArray[np.float32]:
    shape = (n, drafter.n_features)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def propose(
    drafter: Drafter, anchor: int, rows: NDArray[np.float32], n_draft: int | None = None
) -> Draft:
    n_draft = n_draft or drafter.block_size - 1
    (draft,) = drafter.draft([DraftRequest(0, anchor, rows, n_draft)])
    assert len(draft) == n_draft
    return draft


def assert_same(ours: Draft, theirs: Draft, noise: float) -> None:
    """The same candidates, as far as noise leaves them in order."""
    assert ours.candidates is not None and theirs.candidates is not None
    assert np.abs(ours.candidates.logprobs - theirs.candidates.logprobs).max() < noise
    assert (ours.candidates.ids != theirs.candidates.ids).mean() < 0.1
    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=noise)


def assert_greedy(draft: Draft, expected: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """`draft` takes the best of `expected` [n, n_vocab], which is given the draft itself; `rows`
    are those that count."""
    tokens = torch.tensor(draft.tokens)[:, None]
    of_tokens = expected.gather(1, tokens)[:, 0]
    error = of_tokens - torch.tensor(draft.logprobs)
    regret = expected.max(dim=1).values - of_tokens
    for values in (error.abs(), regret):
        assert (values if rows is None else values[rows]).max() < NOISE


# Against the fused graph and the reference


ALIKE = COMMON | ALONE


@pytest.mark.one_in(16)
@pytest.mark.parametrize("options", ALIKE.values(), ids=ALIKE.keys())
def test_equals_the_fused_graph(options: Mapping[str, Any], target: Target, tmp_path: Path) -> None:
    theirs = opened(tmp_path, target, options)
    ours = open_drafter(theirs.path, target, n_seq=1, n_ctx=256, n_threads=1)
    assert isinstance(ours, FusedDrafter) and ours.block_size == theirs.block_size
    rows = features(50, theirs)
    for begin, end in ((0, 33), (33, 40)):
        for drafter in (ours, theirs):
            drafter.inject(0, rows[begin:end])
    for anchor, new in ((5, rows[:0]), (7, rows[40:44]), (9, rows[44:])):
        assert_same(propose(theirs, anchor, new), propose(ours, anchor, new), ROUNDING)
        assert theirs.length(0) == ours.length(0)


@pytest.mark.parametrize(
    "options", [CAPPED, *ALONE.values()], ids=["scale and cap of logits", *ALONE]
)
def test_equals_the_reference(options: Mapping[str, Any], target: Target, tmp_path: Path) -> None:
    drafter = opened(tmp_path, target, options)
    reference = Reference(drafter.path, target.path, cache_dtype=torch.float16)
    rows = features(40, drafter)
    reference.inject(0, rows)
    drafter.inject(0, rows)
    draft = propose(drafter, 5, rows[:0])
    expected = reference.draft(0, 5)
    assert draft.candidates is not None
    ids = torch.from_numpy(draft.candidates.ids.astype(np.int64))
    found = torch.from_numpy(draft.candidates.logprobs)
    assert (expected.gather(1, ids) - found).abs().max() < NOISE
    assert_greedy(draft, expected)


@pytest.mark.parametrize("options", DSPARK.values(), ids=DSPARK.keys())
def test_the_chain_of_dspark_equals_the_reference(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter = opened(tmp_path, target, options)
    reference = Reference(drafter.path, target.path, cache_dtype=torch.float16)
    assert drafter.spec.family == "dspark"
    markov = options["markov"]
    from_anchor = markov.sample_from_anchor is not False
    assert drafter.block_size == reference.block_size + from_anchor
    rows = features(40, drafter)
    reference.inject(0, rows)
    for anchor, begin, end in ((5, 0, 30), (9, 30, 40)):
        draft = propose(drafter, anchor, rows[begin:end])
        reference.truncate(0, end)
        assert draft.candidates is None
        expected = reference.draft_chain(0, anchor, draft.tokens)
        assert_greedy(draft, expected)
        reference.inject(0, rows[end:])
    # what was taken before matters
    other = reference.draft_chain(0, anchor, [token ^ 1 for token in draft.tokens])
    assert (expected[1:] - other[1:]).nan_to_num().abs().amax(dim=1).min() > 1


@pytest.mark.parametrize("options", DFLASH2.values(), ids=DFLASH2.keys())
def test_the_path_of_dflash2_equals_the_reference(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter = opened(tmp_path, target, options)
    reference = Reference(drafter.path, target.path, cache_dtype=torch.float16)
    assert drafter.spec.family == "dflash2"
    top_k = options["selector"].top_k
    rows = features(40, drafter)
    reference.inject(0, rows)
    drafter.inject(0, rows)
    for anchor in (5, 9, 77):
        draft = propose(drafter, anchor, rows[:0])
        assert draft.candidates is None
        expected = reference.draft_path(0, anchor, draft.tokens)
        assert (expected > -math.inf).sum(dim=1).tolist() == [top_k] * len(draft)
        # of two tokens that are all but equal, either may be the last candidate
        best = reference.scaled(reference.logits(0, anchor))[1:].topk(top_k + 1).values
        clear = best[:, -2] - best[:, -1] > NOISE / 3
        assert clear.sum() > len(draft) / 2
        assert_greedy(draft, expected, clear)


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES.keys())
def test_fewer_drafts_are_the_first_of_the_whole_block(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    drafter = opened(tmp_path, target, options)
    drafter.inject(0, features(20, drafter))
    nothing = features(0, drafter)
    whole = propose(drafter, 5, nothing)
    for n_draft in range(1, drafter.block_size):
        part = propose(drafter, 5, nothing, n_draft)
        assert part.tokens == whole.tokens[:n_draft]
        assert part.logprobs == pytest.approx(whole.logprobs[:n_draft])


# Sequences


@pytest.mark.parametrize("options", [{}, *FAMILIES.values()], ids=["DFlash", *FAMILIES])
def test_sequences_do_not_see_one_another(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    """Also where their blocks do not fit one batch: 20 blocks, 128 rows at once."""
    n_seq = 20
    together = opened(tmp_path, target, options, n_seq=n_seq)
    alone = opened(tmp_path, target, options)
    histories = [features(3 + 2 * seq, together, seed=seq) for seq in range(n_seq)]
    for seq, rows in enumerate(histories):
        together.inject(seq, rows[:-2])
    n_draft = together.block_size - 1
    order = np.random.default_rng(1).permutation(n_seq).tolist()
    drafts = together.draft(
        [DraftRequest(seq, 5 + seq, histories[seq][-2:], n_draft) for seq in order]
    )
    for seq, draft in zip(order, drafts, strict=True):
        alone.truncate(0, 0)
        expected = propose(alone, 5 + seq, histories[seq])
        assert together.length(seq) == alone.length(0) == len(histories[seq])
        # cells lie in another order, so sums round differently
        agreement = [a == b for a, b in zip(draft.tokens, expected.tokens, strict=True)]
        assert draft.logprobs[0] == pytest.approx(expected.logprobs[0], abs=NOISE)
        assert sum(agreement) >= len(agreement) - 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_history_ends_as_in_the_fused_graph(
    data: st.DataObject, both: tuple[LlamaDrafter, FusedDrafter]
) -> None:
    sequences = st.integers(0, 2)
    for drafter in both:
        for seq in range(3):
            drafter.truncate(seq, 0)
    for step in range(data.draw(st.integers(1, 8), "calls")):
        call = data.draw(st.sampled_from(["inject", "draft", "truncate", "copy"]), "call")
        seq = data.draw(sequences, "seq")
        length = both[0].length(seq)
        rows = features(data.draw(st.integers(0, min(90 - length, 40)), "rows"), both[0], step)
        upto = data.draw(st.integers(0, length), "length")
        to = data.draw(sequences, "to")
        for drafter in both:
            if call == "inject":
                drafter.inject(seq, rows)
            elif call == "draft":
                drafter.draft([DraftRequest(seq, 7, rows, 3)])
            elif call == "truncate":
                drafter.truncate(seq, upto)
            else:
                drafter.copy(seq, to, upto)
    requests = [DraftRequest(seq, 9, features(0, both[0]), 4) for seq in (2, 0, 1)]
    assert [both[0].length(seq) for seq in range(3)] == [both[1].length(seq) for seq in range(3)]
    for theirs, ours in zip(both[0].draft(requests), both[1].draft(requests), strict=True):
        assert_same(theirs, ours, NOISE)  # cells lie in another order


@pytest.fixture(scope="module")
def both(
    target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LlamaDrafter, FusedDrafter]:
    options = {"sliding_window": 16, "pattern": (True, False), "block_size": 5}
    folder = tmp_path_factory.mktemp("both")
    theirs = opened(folder, target, options, n_seq=3, n_ctx=90)
    ours = open_drafter(theirs.path, target, n_seq=3, n_ctx=90, n_threads=1)
    assert isinstance(ours, FusedDrafter)
    return theirs, ours


@pytest.mark.parametrize("n_ctx", [40, 256, 700])
def test_the_end_of_the_context_is_an_error_that_changes_nothing(
    n_ctx: int, target: Target, tmp_path: Path
) -> None:
    drafter = opened(tmp_path, target, FAMILIES["DSpark"], n_seq=2, n_ctx=n_ctx)
    drafter.inject(0, features(n_ctx - 2, drafter))
    drafter.inject(1, features(n_ctx, drafter))
    before = propose(drafter, 5, features(0, drafter))
    for n in (3, 100, 5000):
        with pytest.raises(ContextFullError, match=str(n_ctx)):
            drafter.inject(0, features(n, drafter))
        with pytest.raises(ContextFullError, match=str(n_ctx)):
            propose(drafter, 5, features(n, drafter))
    assert (drafter.length(0), drafter.length(1)) == (n_ctx - 2, n_ctx)
    assert propose(drafter, 5, features(0, drafter)) == before
    propose(drafter, 5, features(2, drafter))
    drafter.draft([DraftRequest(seq, 5, features(0, drafter), 8) for seq in (0, 1)])
    assert (drafter.length(0), drafter.length(1)) == (n_ctx, n_ctx)


def test_bad_requests_are_refused(target: Target, tmp_path: Path) -> None:
    drafter = opened(tmp_path, target, {}, n_seq=2)
    drafter.inject(0, features(20, drafter))
    nothing = features(0, drafter)
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
        with pytest.raises(InputError, match=r"\d"):
            drafter.draft(requests)
    for call in (
        lambda: drafter.copy(0, 1, 21),
        lambda: drafter.copy(0, 2, 1),
        lambda: drafter.truncate(0, -1),
        lambda: drafter.length(2),
    ):
        with pytest.raises(InputError, match=r"\d"):
            call()
    assert drafter.draft([]) == []
    assert (drafter.length(0), drafter.length(1)) == (20, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_features_that_are_no_numbers_are_refused(
    value: float, target: Target, tmp_path: Path
) -> None:
    drafter = opened(tmp_path, target, {}, n_seq=2)
    rows = features(4, drafter)
    expected = propose(drafter, 5, rows)
    spoilt = rows.copy()
    spoilt[2, 3] = value
    with pytest.raises(BackendError, match="not finite"):
        drafter.inject(1, spoilt)
    with pytest.raises(BackendError, match="not finite"):
        drafter.draft([DraftRequest(0, 5, rows[:0], 3), DraftRequest(1, 5, spoilt, 3)])
    assert (drafter.length(0), drafter.length(1)) == (4, 0)
    assert propose(drafter, 5, rows[:0]).tokens == expected.tokens


@pytest.mark.parametrize("options", [{}, *FAMILIES.values()], ids=["DFlash", *FAMILIES])
def test_a_drafter_that_puts_out_no_numbers_says_so_and_changes_nothing(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    good = write_drafter(tmp_path / "good.gguf", target.path, **options)
    path = changed(good, tmp_path / "bad.gguf", tensors=spoil)
    drafter = open_llama_drafter(path, target, n_seq=2, n_ctx=64)
    drafter.inject(0, features(4, drafter))
    requests = [DraftRequest(seq, 5, features(2, drafter), 3) for seq in (0, 1)]
    for _ in range(2):
        with pytest.raises(BackendError, match="not a number"):
            drafter.draft(requests)
        assert (drafter.length(0), drafter.length(1)) == (4, 0)


def test_any_order_of_closing(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target.gguf")
    target = Target.load(path, n_ctx=64, n_threads=1, tapped_layers=(1,))
    first, second = (opened(tmp_path, target, {}) for _ in range(2))
    first.close()
    first.close()
    with pytest.raises(ClosedError):
        first.length(0)
    with pytest.raises(ClosedError):
        propose(first, 5, np.zeros((0, 64), np.float32))
    propose(second, 5, features(3, second))
    opened(tmp_path, target, {})  # dropped without being closed
    gc.collect()
    target.close()
    with pytest.raises(ClosedError):
        second.inject(0, np.zeros((1, 64), np.float32))


# At work in the engine


@pytest.mark.slow
def test_the_shipped_pair_answers_as_without_and_accepts_as_fused() -> None:
    prompts = demo.prompts()
    prompts = prompts["chat"][:3] + prompts["code"][:3]
    accepted: dict[str, float] = {}
    with open_target() as target:
        tokens = [target.vocabulary.tokenize(prompt) for prompt in prompts]
        plain = [plain_tokens(target, prompt, 96) for prompt in tokens]
        for runner, opening in (("fused", open_drafter), ("llama.cpp", open_llama_drafter)):
            drafter = opening(demo.pair()[1], target, n_seq=1, n_ctx=target.n_ctx)
            engine = Engine(target, drafter)
            answers = [answer(engine, prompt, 16, 96) for prompt in tokens]
            assert [a.tokens for a in answers] == plain
            stats = [a.stats for a in answers]
            accepted[runner] = sum(s.emitted for s in stats) / sum(s.rounds for s in stats)
            engine.slots.forget_all()
            drafter.close()
    assert accepted["fused"] > 2.8
    assert accepted["llama.cpp"] == pytest.approx(accepted["fused"], rel=0.02)


# The host's part


def test_a_path_follows_the_scores_after_the_token_taken() -> None:
    after_anchor = [11, 12, 0.0, 1.0, 0.0, 1.0]
    after_11_or_12 = [21, 22, 5.0, 0.0, 0.0, math.log(3.0)]
    draft = best_path(np.array([after_anchor, after_11_or_12], np.float32), 2)
    assert draft.tokens == [12, 22] and draft.parents == [-1, 0]
    assert draft.logprobs == pytest.approx([-math.log(1 + math.exp(-1)), math.log(0.75)])
    with pytest.raises(BackendError, match="not a number"):
        best_path(np.full((1, 6), np.nan, np.float32), 2)
