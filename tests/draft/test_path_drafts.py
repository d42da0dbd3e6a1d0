"""Drafters whose positions depend on one another, DSpark and DFlash 2, in the native draft graph:
against llama.cpp's own context and against the PyTorch reference, on random weights."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.drafter import Drafter, DraftRequest
from dflash_local.draft.fused_drafter import TREE_TOP_K, FusedDrafter
from dflash_local.errors import BackendError
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from drafter_kinds import ALONE, CAPPED, DFLASH2, DSPARK
from gap_rule import first_difference
from gguf_files import Tensor, changed, spoil
from llama_drafter import LlamaDrafter
from reference import Reference
from synthetic import Markov, Selector, write_drafter, write_target

torch.set_num_threads(1)  # the products are small

# llama.cpp computes the same, in another order only.
ROUNDING = 1e-4
# Against the reference: keys and values are halves.
NOISE = 0.02

SPARK: dict[str, Mapping[str, Any]] = {
    **DSPARK,
    "capped logits": {"markov": Markov(), **CAPPED},
    "block of 2": {"markov": Markov(sample_from_anchor=False), "block_size": 2},
    "sinks and scales": {"markov": Markov(), "sinks": True, "scales": True},
}
TWO: dict[str, Mapping[str, Any]] = {
    **DFLASH2,
    "reduced vocabulary": {"selector": Selector(), "reduced_vocabulary": 100},
    "block of 2": {"selector": Selector(), "block_size": 2},
    "biases and norms after": {
        "selector": Selector(),
        "biases": ("q", "k", "v", "output"),
        "post_norms": True,
    },
}
BOTH = {f"DSpark, {name}": options for name, options in SPARK.items()} | {
    f"DFlash 2, {name}": options for name, options in TWO.items()
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=5)
    with Target.load(path, n_ctx=512, n_threads=1, n_seq=4, tapped_layers=(1,)) as loaded:
        yield loaded


def opened(path: Path, target: Target, *, for_trees: bool, n_seq: int = 1) -> FusedDrafter:
    drafter = open_drafter(path, target, n_seq=n_seq, n_ctx=256, n_threads=1, for_trees=for_trees)
    assert isinstance(drafter, FusedDrafter)
    return drafter


def features(n: int, drafter: FusedDrafter, seed: int = 0) -> NDArray[np.float32]:
    shape = (n, drafter.n_features)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def propose(drafter: Drafter, anchor: int, rows: NDArray[np.float32], seq: int = 0) -> Draft:
    (draft,) = drafter.draft([DraftRequest(seq, anchor, rows, drafter.block_size - 1)])
    assert len(draft) == drafter.block_size - 1
    return draft


def known(draft: Draft) -> tuple[Candidates, NDArray[np.float32]]:
    assert draft.candidates is not None and draft.candidates.steps is not None
    return draft.candidates, draft.candidates.steps


@pytest.mark.one_in(4)
@pytest.mark.parametrize("for_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    "options",
    [o for o in BOTH.values() if "biases" not in o],
    ids=[name for name, o in BOTH.items() if "biases" not in o],
)
def test_the_path_is_that_of_llama_cpp(
    options: Mapping[str, Any], for_trees: bool, target: Target, tmp_path: Path
) -> None:
    """Of three sequences in one graph; without the confidence, which llama.cpp does not look at."""
    path = write_drafter(tmp_path / "drafter.gguf", target.path, **_without_confidence(options))
    ours = opened(path, target, for_trees=for_trees, n_seq=4)
    theirs = LlamaDrafter(path, target, n_seq=4, n_ctx=256)
    assert ours.block_size == theirs.block_size
    rows = features(60, ours)
    for drafter in (ours, theirs):
        drafter.inject(0, rows[:33])
        drafter.inject(2, rows[:7])
    n = ours.block_size - 1
    for begin in (33, 40, 40):
        requests = [
            DraftRequest(2, begin, rows[begin : begin + 3], n),
            DraftRequest(0, 5, rows[begin : begin + 1], n),
            DraftRequest(3, 7, rows[:begin:9], n),
        ]
        for our, their in zip(ours.draft(requests), theirs.draft(requests), strict=True):
            assert our.tokens == their.tokens
            assert our.logprobs == pytest.approx(their.logprobs, abs=ROUNDING)


def _without_confidence(options: Mapping[str, Any]) -> dict[str, Any]:
    changed_ = dict(options)
    if "markov" in options:
        markov = options["markov"]
        changed_["markov"] = Markov(markov.rank, False, markov.sample_from_anchor)
    return changed_


@pytest.mark.one_in(8)
@pytest.mark.parametrize("options", SPARK.values(), ids=SPARK.keys())
def test_each_step_of_dspark_is_that_of_the_reference(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    """After the first candidate of a position as after the others: there, as far as the candidates
    hold the same share of the probability."""
    path = write_drafter(tmp_path / "drafter.gguf", target.path, **_without_confidence(options))
    drafter = opened(path, target, for_trees=True)
    reference = Reference(path, target.path, cache_dtype=torch.float16)
    rows = features(40, drafter)
    reference.inject(0, rows)
    draft = propose(drafter, 5, rows)
    candidates, steps = known(draft)
    n, k = candidates.ids.shape
    assert k == TREE_TOP_K and steps.shape == (n, k, k)
    assert draft.tokens == candidates.ids[:, 0].tolist()
    assert np.array_equal(steps[:, 0], candidates.logprobs)
    for i in range(n):
        ids = torch.from_numpy(candidates.ids[i].astype(np.int64))
        for j in range(k):
            before = int(candidates.ids[i - 1, j]) if i else 5
            expected = reference.draft_after(0, 5, i, before)[ids]
            found = torch.from_numpy(steps[i, j])
            if j == 0:
                assert (expected - found).abs().max() < NOISE
            # the share of each among the candidates
            parted = torch.log_softmax(expected, 0) - torch.log_softmax(found, 0)
            assert parted.abs().max() < 2 * NOISE
        best = reference.draft_after(0, 5, i, draft.tokens[i - 1] if i else 5)
        assert best.max() - best[ids[0]] < NOISE
    # As on a GPU, where the tokens before are guessed: each round has one more of them right.
    guessing = opened(path, target, for_trees=True)
    guessing._open.n_rounds = 3
    assert propose(guessing, 5, rows).tokens[:3] == draft.tokens[:3]


@pytest.mark.parametrize("options", TWO.values(), ids=TWO.keys())
def test_each_step_of_dflash_2_is_that_of_the_reference(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", target.path, **options)
    drafter = opened(path, target, for_trees=True)
    reference = Reference(path, target.path, cache_dtype=torch.float16)
    rows = features(40, drafter)
    reference.inject(0, rows)
    draft = propose(drafter, 5, rows)
    if drafter.top_k == 1:  # a selector of one candidate
        assert draft.candidates is not None and draft.candidates.steps is None
        return
    candidates, steps = known(draft)
    n, k = candidates.ids.shape
    assert k == min(options["selector"].top_k, TREE_TOP_K)
    assert np.array_equal(steps[:, 0], candidates.logprobs)
    n_compared = 0
    for j in range(k):
        before = [5, *candidates.ids[:-1, j].tolist()]
        expected = reference.draft_steps(0, 5, before)
        for i in range(n):
            ids = torch.from_numpy(candidates.ids[i].astype(np.int64))
            wanted = expected[i][ids]
            if torch.isinf(wanted).any():
                continue  # of two tokens that are all but equal, either may be the last candidate
            n_compared += 1
            assert (wanted - torch.from_numpy(steps[i, j])).abs().max() < 2 * NOISE
    assert n_compared > n * k / 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("for_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    "options",
    [DSPARK["from the anchor"], DSPARK["from the masks"], DSPARK["reduced vocabulary"]],
    ids=["from the anchor", "from the masks", "reduced vocabulary"],
)
def test_the_confidence_is_the_chance_of_the_first_choice(
    options: Mapping[str, Any], for_trees: bool, target: Target, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", target.path, **options)
    plain = write_drafter(tmp_path / "plain.gguf", target.path, **_without_confidence(options))
    reference = Reference(path, target.path, cache_dtype=torch.float16)
    drafter = opened(path, target, for_trees=for_trees)
    rows = features(40, drafter)
    reference.inject(0, rows)
    draft = propose(drafter, 5, rows)
    bare = propose(opened(plain, target, for_trees=for_trees), 5, rows)
    assert draft.tokens == bare.tokens  # it changes no path
    for i, logprob in enumerate(draft.logprobs):
        before = draft.tokens[i - 1] if i else 5
        assert math.exp(logprob) == pytest.approx(reference.confidence(0, 5, i, before), abs=NOISE)
    if not for_trees:
        return
    (candidates, steps), (_, others) = known(draft), known(bare)
    for i in range(1, len(draft)):
        for j in range(candidates.ids.shape[1]):
            chance = reference.confidence(0, 5, i, int(candidates.ids[i - 1, j]))
            best = int(others[i, j].argmax())
            assert math.exp(steps[i, j, best]) == pytest.approx(chance, abs=NOISE)
            # the others share the rest as they did, none more likely than the first choice
            share = math.log((1 - chance) / (1 - math.exp(others[i, j, best])))
            wanted = np.minimum(others[i, j] + share, math.log(chance))
            wanted[best] = math.log(chance)
            assert np.abs(steps[i, j] - wanted).max() < 0.1


@pytest.mark.one_in(20)
@pytest.mark.parametrize("n_vocab", [320, 4096])
@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("family", ["DSpark", "DFlash 2"])
def test_heads_of_every_type(family: str, quant: str, n_vocab: int, tmp_path: Path) -> None:
    """The tables, from which rows are looked up, are of the type as well."""
    path = write_target(tmp_path / "target.gguf", n_layer=2, n_embd=256, n_vocab=n_vocab)
    head = {"markov": Markov(256)} if family == "DSpark" else {"selector": Selector(256)}
    file = write_drafter(
        tmp_path / "drafter.gguf", path, quant=quant, head_dim=64, n_ff=256, **head
    )
    with Target.load(path, n_ctx=128, n_threads=1, tapped_layers=(1,)) as target:
        drafter = opened(file, target, for_trees=True)
        theirs = LlamaDrafter(file, target, n_seq=1, n_ctx=128)
        rows = features(20, drafter)
        ours, other = propose(drafter, 5, rows), propose(theirs, 5, rows)
        candidates, steps = known(ours)
        assert np.isfinite(steps).all()
        # Sums in another order round to other 8-bit activations: all but equal paths may part.
        at = first_difference(ours.tokens, other.tokens)
        if at is not None:
            theirs_at = candidates.ids[at].tolist().index(other.tokens[at])
            assert candidates.logprobs[at, 0] - candidates.logprobs[at, theirs_at] < 0.1


@pytest.mark.parametrize("for_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    "options",
    [SPARK["from the anchor"], SPARK["no confidence"], TWO["plain"], ALONE["attention sinks"]],
    ids=["DSpark", "DSpark without confidence", "DFlash 2", "sinks"],
)
def test_a_drafter_that_puts_out_no_numbers_says_so(
    options: Mapping[str, Any], for_trees: bool, target: Target, tmp_path: Path
) -> None:
    good = write_drafter(tmp_path / "good.gguf", target.path, **options)
    drafter = opened(
        changed(good, tmp_path / "bad.gguf", tensors=spoil), target, for_trees=for_trees, n_seq=2
    )
    drafter.inject(0, features(4, drafter))
    requests = [DraftRequest(seq, 5, features(2, drafter), 3) for seq in (0, 1)]
    for _ in range(2):
        with pytest.raises(BackendError, match="not a number"):
            drafter.draft(requests)
        # as what the target has stored might not be numbers either
        assert (drafter.length(0), drafter.length(1)) == (0, 0)


# What leaves the range of halves


def _larger(factors: Mapping[str, float]) -> Any:
    """Weights times factors, for all tensors whose name ends so."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name, (values, kind) in tensors.items():
            for end, factor in factors.items():
                if name.endswith(end):
                    tensors[name] = (values * values.dtype.type(factor), kind)

    return change


@pytest.mark.one_in(16)
@pytest.mark.parametrize("quant", ["F16", "BF16", "F32", "Q8_0"])
@pytest.mark.parametrize(
    ("options", "factors", "size"),
    [
        ({}, {}, 1e5),
        ({}, {"ffn_norm.weight": 300.0, "ffn_down.weight": 1e-3}, 1.0),
        ({"selector": Selector(32)}, {"attn_conv_base": 1e5, "ffn_conv_base": 2e3}, 1.0),
        ({"markov": Markov(32)}, {}, 3e4),
    ],
    ids=["features", "feed-forward", "convolutions", "features of DSpark"],
)
def test_activations_beyond_halves_are_computed(
    options: Mapping[str, Any],
    factors: Mapping[str, float],
    size: float,
    quant: str,
    tmp_path: Path,
) -> None:
    path = write_target(tmp_path / "target.gguf", n_layer=2, head_dim=32)
    good = write_drafter(
        tmp_path / "good.gguf", path, quant=quant, head_dim=32, post_norms=True, **options
    )
    file = changed(
        good, tmp_path / "large.gguf", tensors=_larger(factors if quant != "Q8_0" else {})
    )
    with Target.load(path, n_ctx=128, n_threads=1, tapped_layers=(1,)) as target:
        drafter = opened(file, target, for_trees=True)
        rows = features(20, drafter) * np.float32(size)
        draft = propose(drafter, 5, rows)
        assert np.isfinite(draft.logprobs).all()
        if "selector" in options or "markov" in options:
            return
        reference = Reference(file, path, cache_dtype=torch.float16)
        reference.inject(0, rows)
        expected = reference.draft(0, 5)
        assert draft.candidates is not None
        ids = torch.from_numpy(draft.candidates.ids.astype(np.int64))
        apart = (expected.gather(1, ids) - torch.from_numpy(draft.candidates.logprobs)).abs()
        assert apart.max() < (0.1 if quant in ("F32", "F16") else 0.5)


def test_values_beyond_halves_stay_numbers(target: Target, tmp_path: Path) -> None:
    """The cache holds halves. Larger numbers are kept as the largest of them."""
    good = write_drafter(tmp_path / "good.gguf", target.path, post_norms=True)
    for size in (1e4, 1e6):
        large = changed(good, tmp_path / "l.gguf", tensors=_larger({"attn_v.weight": size}))
        drafter = opened(large, target, for_trees=False)
        drafter.inject(0, features(30, drafter))
        assert np.isfinite(propose(drafter, 5, features(3, drafter)).logprobs).all()
        drafter.close()
