"""Chances of a tree's nodes follow what becomes of them."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dflash_local.draft.draft import Candidates
from dflash_local.draft.tree import grow
from dflash_local.pays.chances import TreeChances, path_chances
from dflash_local.pays.survival import Prior, Survival, TreePrior

BLOCK, K, N_NODES = 8, 4, 24
N_VOCAB = 40


def tree_chances(prior: Prior) -> TreeChances:
    return TreeChances(Survival(prior), prior)


def drafted(rng: np.random.Generator) -> tuple[Candidates, np.ndarray]:
    """Candidates, and the true chances of tokens 0 .. K-1 at each position: at first sight those of
    the drafter, whose other choices come true twice as often as it says."""
    first = rng.uniform(0.5, 0.9, BLOCK - 1)
    others = (1 - first)[:, None] * np.array([[0.25, 0.15, 0.1]])
    said = np.column_stack([first, others])
    ids = np.tile(np.arange(K, dtype=np.int32), (BLOCK - 1, 1))
    true = np.column_stack([first, 2 * others])
    return Candidates(ids, np.log(said).astype(np.float32)), true


def written(rng: np.random.Generator, true: np.ndarray) -> list[int]:
    """What the target writes: a token of each position, K for one that is no candidate."""
    return [int(rng.choice(K + 1, p=[*row, max(1 - row.sum(), 0.0)])) for row in true]


def kept(draft_tokens: list[int], parents: list[int], text: list[int]) -> int:
    edges = {edge: node for node, edge in enumerate(zip(parents, draft_tokens, strict=True))}
    node, n = -1, 0
    while n < len(text) and (node, text[n]) in edges:
        node, n = edges[node, text[n]], n + 1
    return n


def test_the_expected_length_is_the_one_that_comes_out() -> None:
    rng = np.random.default_rng(0)
    prior = Prior(BLOCK, N_NODES)
    known = tree_chances(prior)
    expected, found = [], []
    for i in range(600):
        candidates, true = drafted(rng)
        draft = grow(known.rate(candidates), N_NODES, N_VOCAB)
        chances = path_chances(draft)
        known.notice(draft)
        text = written(rng, true)
        n = kept(draft.tokens, draft.parents, text)
        if i >= 100:
            expected.append(sum(chances))
            found.append(n)
        known.survival.observe_answer(candidates, text[: n + 1])
    assert np.mean(expected) == pytest.approx(np.mean(found), rel=0.1)


def test_chances_fall_as_the_nodes_come() -> None:
    rng = np.random.default_rng(1)
    prior = Prior(BLOCK, N_NODES)
    known = tree_chances(prior)
    for _ in range(20):
        draft = grow(known.rate(drafted(rng)[0]), N_NODES, N_VOCAB)
        chances = path_chances(draft)
        assert all(a >= b - 1e-6 for a, b in pairwise(chances))
        assert len(known.typical()) == N_NODES


def test_what_is_no_number_has_no_chance() -> None:
    prior = Prior(BLOCK, N_NODES)
    known = tree_chances(prior)
    ids = np.tile(np.arange(2, dtype=np.int32), (BLOCK - 1, 1))
    logprobs = np.full((BLOCK - 1, 2), math.nan, np.float32)
    logprobs[0] = [0.5, -math.inf]
    found = known.rate(Candidates(ids, logprobs)).logprobs
    assert np.isfinite(found).all() and (found <= 0).all()
    known.survival.observe_answer(Candidates(ids, logprobs), [0, 1])
    assert 0 < known.typical()[0] <= 1


def test_what_is_learnt_of_trees_is_kept_and_read_again() -> None:
    rng = np.random.default_rng(2)
    prior = Prior(BLOCK, N_NODES)
    known = tree_chances(prior)
    for _ in range(60):
        candidates, true = drafted(rng)
        known.notice_candidates(candidates)
        known.survival.observe_answer(candidates, written(rng, true))
    again = Prior.from_dict(json.loads(json.dumps(prior.as_dict())), BLOCK, N_NODES)
    assert again.trees.side == pytest.approx(prior.trees.side)
    assert again.trees.side > 1.2  # they come true more often than the drafter says
    assert tree_chances(again).typical() == pytest.approx(tree_chances(prior).typical())
    assert again.trees.curve([0.1]) != TreePrior(N_NODES).curve([0.1])
    # Trees of another size begin anew, with what candidates are worth.
    other = Prior.from_dict(prior.as_dict(), BLOCK, 2 * N_NODES)
    assert len(tree_chances(other).typical()) == 2 * N_NODES
    assert other.trees.side == prior.trees.side


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        {"curve": None, "promised": "x", "kept": 1},
        {"curve": [1, "y"], "promised": 1, "kept": 1},
        {"curve": None, "promised": 0, "kept": 1},
        {"curve": [math.nan], "promised": 1, "kept": 1},
    ],
)
def test_what_is_no_prior_of_trees_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="no prior of trees"):
        TreePrior.from_dict(raw, N_NODES)


def test_steps_after_other_tokens_are_worth_what_other_candidates_are() -> None:
    """Those after the first candidates, which are the chain's, as without steps."""
    rng = np.random.default_rng(3)
    prior = Prior(BLOCK, N_NODES)
    known = tree_chances(prior)
    for _ in range(60):
        candidates, true = drafted(rng)
        known.notice_candidates(candidates)
        known.survival.observe_answer(candidates, written(rng, true))
    candidates, _ = drafted(rng)
    steps = np.log(rng.dirichlet(np.ones(K), (BLOCK - 1, K))).astype(np.float32)
    steps[:, 0] = candidates.logprobs
    with_steps = Candidates(candidates.ids, candidates.logprobs, steps=steps)
    rated, plain = known.rate(with_steps), known.rate(candidates)
    assert rated.steps is not None and rated.steps.shape == steps.shape
    assert np.array_equal(rated.logprobs, plain.logprobs)
    assert np.array_equal(rated.steps[:, 0], plain.logprobs)
    assert np.isfinite(rated.steps).all() and (rated.steps <= 0).all()
    # the order of what may follow a token stays
    order = np.argsort(-steps[:, 1:], axis=2)
    sorted_steps = np.take_along_axis(rated.steps[:, 1:], order, axis=2)
    assert (np.diff(sorted_steps, axis=2) <= 0).all()
    draft = grow(rated, N_NODES, N_VOCAB)
    chances = path_chances(draft)
    assert chances == sorted(chances, reverse=True)
