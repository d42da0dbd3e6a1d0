"""The chance of each drafted node to be accepted: face value first, then what is seen."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dflash_local.controller.acceptance import Acceptance
from dflash_local.draft.draft import ANCHOR, Candidates, Draft
from dflash_local.draft.tree import grow
from drafted_text import BLOCK, TEXTS, text
from rounds import emitted

N_NODES, N_VOCAB = 24, 40


def chain(logprobs: list[float]) -> Draft:
    return Draft.chain([0] * len(logprobs), logprobs)


def follow(known: Acceptance, name: str, rounds: int, seed: int = 0) -> list[tuple[float, int]]:
    """Of each draft of a text, the tokens that were foreseen and those that came."""
    found = []
    for place in text(name).answer(rounds, seed)[:rounds]:
        draft = place.proposal
        foreseen = sum(known.chances(draft, "chain"))
        tokens = emitted(draft, place.written)
        found.append((foreseen, len(tokens) - 1))
        known.notice(known.chances(draft, "chain"), "chain")
        known.observe(draft, tokens)
    return found


def grown(known: Acceptance, candidates: Candidates, n_nodes: int = N_NODES) -> Draft:
    return grow(candidates, n_nodes, N_VOCAB, chances=known.rate(candidates))


def test_confidence_is_taken_at_face_value_at_first() -> None:
    for p in (0.4, 0.5, 0.8, 0.95, 0.99):
        (found,) = Acceptance(BLOCK).chances(chain([math.log(p)]), "chain")
        assert found == pytest.approx(p, abs=0.05)


def test_chances_never_rise_along_a_chain() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        curve = Acceptance(BLOCK).chances(chain((-rng.exponential(2.0, 15)).tolist()), "chain")
        assert all(a >= b for a, b in pairwise(curve))
        assert 0 <= curve[-1] <= curve[0] <= 1


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "switching"])
def test_what_is_foreseen_comes_true(name: str) -> None:
    """After 60 rounds, the tokens foreseen are those that come, whatever confidence says."""
    found = follow(Acceptance(BLOCK), name, 600)[60:]
    foreseen, true = (sum(each) / len(found) for each in zip(*found, strict=True))
    assert foreseen == pytest.approx(true, rel=0.15, abs=0.15)


def test_a_request_begins_with_what_others_have_seen() -> None:
    known = Acceptance(BLOCK)
    assert sum(known.usual("chain")) == sum(known.cold("chain"))
    follow(known, "over-confident", 200)
    later = follow(known, "over-confident", 200, seed=5)
    assert sum(known.usual("chain")) == pytest.approx(np.mean(later, axis=0)[1], abs=0.5)


def test_what_is_no_number_has_no_chance() -> None:
    known = Acceptance(BLOCK, N_NODES)
    odd = chain([-math.inf, math.nan, 1e-7, 5.0, -1e9, 0.0])
    for n in (6, 0, 3):
        known.observe(odd, [0] * (n + 1))
        assert all(0 <= chance <= 1 for chance in known.chances(odd, "chain"))
    known.observe(Draft.chain([]), [0])
    ids = np.tile(np.arange(2, dtype=np.int32), (BLOCK - 1, 1))
    logprobs = np.full((BLOCK - 1, 2), math.nan, np.float32)
    logprobs[0] = [0.5, -math.inf]
    for steps in (None, np.full((BLOCK - 1, 2, 2), math.nan, np.float32)):
        found = grown(known, Candidates(ids, logprobs, steps=steps)).logprobs
        assert len(found) == N_NODES
        assert np.isfinite(found).all() and max(found) <= 0


def test_a_short_draft_says_nothing_of_how_likely_later_tokens_are_after_its_last() -> None:
    known = Acceptance(BLOCK)
    known.notice([0.9**j for j in range(1, 16)], "chain")
    before = known.usual("chain")
    known.notice([0.3, 0.1], "chain")
    after = known.usual("chain")
    assert after[0] < before[0] and after[1] < before[1]
    steps = [[later / sooner for sooner, later in pairwise(each[1:])] for each in (before, after)]
    assert steps[0] == pytest.approx(steps[1])


@pytest.mark.parametrize("name", ["code", "prose", "shipped"])
def test_the_expected_length_of_a_tree_is_the_one_that_comes_out(name: str) -> None:
    known, expected, found = Acceptance(BLOCK, N_NODES), [], []
    for i, place in enumerate(text(name).answer(900, 0)):
        candidates = place.proposal.candidates
        assert candidates is not None
        tree = grown(known, candidates)
        chances = known.chances(tree, "tree")
        assert all(a >= b - 1e-6 for a, b in pairwise(chances))
        tokens = emitted(tree, place.written)
        known.observe(tree, tokens)
        if i >= 100:
            expected.append(sum(chances))
            found.append(len(tokens) - 1)
    assert np.mean(expected) == pytest.approx(np.mean(found), rel=0.15)


def test_chains_tell_what_trees_would_be_worth_and_the_other_way_round() -> None:
    known = Acceptance(BLOCK, N_NODES)
    for place in text("code").answer(200, 0):
        candidates = place.proposal.candidates
        assert candidates is not None
        tree = grown(known, candidates)
        as_tree, as_chain = (known.of_other_shape(tree, s) for s in ("tree", "chain"))
        assert as_tree == pytest.approx(known.chances(tree, "tree"))
        assert as_chain == pytest.approx(known.chances(place.proposal, "chain"))


def test_steps_after_other_tokens_are_worth_what_other_candidates_are() -> None:
    """Those after the first candidates, which are the chain's, as without steps."""
    rng = np.random.default_rng(3)
    known = Acceptance(BLOCK, N_NODES)
    follow(known, "shipped", 100)
    k = 5
    ids = np.arange(2 * k, dtype=np.int32).reshape(2, k)
    steps = np.log(rng.dirichlet(np.ones(k), (2, k))).astype(np.float32)
    steps[:, 0] = np.sort(steps[:, 0], axis=1)[:, ::-1]
    candidates = Candidates(ids, steps[:, 0])
    with_steps = Candidates(ids, steps[:, 0], steps=steps)
    tree, plain = (grown(known, each, k + k * k) for each in (with_steps, candidates))
    assert len(tree) == len(plain) == k + k * k
    assert max(tree.logprobs) <= 0
    chances = tree.chances
    assert chances == sorted(chances, reverse=True)

    def after(draft: Draft, place: int) -> dict[int, float]:
        """The logarithms of what follows a candidate of the first position."""
        (node,) = (n for n, t in enumerate(draft.tokens) if t == place)
        nodes = zip(draft.parents, draft.tokens, draft.logprobs, strict=True)
        return {token - k: chance for parent, token, chance in nodes if parent == node}

    assert after(tree, 0) == after(plain, 0)
    for place in range(1, k):  # the order of what may follow a token stays
        found = after(tree, place)
        in_order = [found[int(j)] for j in np.argsort(-steps[1, place])]
        assert in_order == sorted(in_order, reverse=True)
        assert found != after(plain, place)


@pytest.mark.parametrize("has_steps", [False, True])
def test_what_follows_other_candidates_than_the_first_is_learnt(has_steps: bool) -> None:
    """Of a drafter that is surest there, and wrong."""
    rng = np.random.default_rng(5)
    known, expected, found = Acceptance(BLOCK, 8), [], []
    n, k = 4, 3
    ids = np.arange(n * k, dtype=np.int32).reshape(n, k)
    logprobs = np.tile(np.log(np.array([0.5, 0.4, 0.05], np.float32)), (n, 1))
    steps = np.tile(np.log(np.array([0.98, 0.01, 0.005], np.float32)), (n, k, 1))
    steps[:, 0] = logprobs
    candidates = Candidates(ids, logprobs, steps=steps if has_steps else None)
    for i in range(400):
        place = rng.choice(k, n, p=[0.5, 0.4, 0.1])
        text = [*(int(ids[j, place[j]]) for j in range(n)), 99]
        if (left := next((j for j in range(n) if place[j] > 0), n)) < n:
            text[left + 1 :] = [99]  # none of its candidates
        tree = grown(known, candidates, 8)
        tokens = emitted(tree, text)
        known.observe(tree, tokens)
        if i >= 100:
            expected.append(sum(known.chances(tree, "tree")))
            found.append(len(tokens) - 1)
    assert np.mean(expected) == pytest.approx(np.mean(found), rel=0.1)
    is_first = [token % k == 0 for token in tree.tokens]
    assert all(parent == ANCHOR or is_first[parent] for parent in tree.parents)


def test_it_is_kept_and_read_again() -> None:
    known = Acceptance(BLOCK, N_NODES)
    follow(known, "shipped", 100)
    known.notice([0.5] * N_NODES, "tree")
    raw = json.loads(json.dumps(known.as_dict()))
    again = Acceptance.from_dict(raw, BLOCK, N_NODES)
    assert again.as_dict() == known.as_dict() and again.n_verified == 100
    # Trees of another size begin anew.
    other = Acceptance.from_dict(raw, BLOCK, 2 * N_NODES)
    assert other.usual("chain") == known.usual("chain") and len(other.usual("tree")) == 2 * N_NODES


def test_a_usual_tree_has_as_many_nodes_as_a_tree_may_have() -> None:
    assert len(Acceptance(BLOCK, 100).cold("tree")) == 100


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        [],
        {"rounds": 1, "curves": {}, "filter": [0.0] * 4},
        {"rounds": 1, "curves": {}, "filter": [math.nan] * 5},
        {"rounds": 1, "curves": {"chain": [0.5]}, "filter": [0.0] * 5},
        {"rounds": 1, "curves": {"chain": "x" * 15}, "filter": [0.0] * 5},
        {"rounds": "x", "curves": {}, "filter": [0.0] * 5},
        {"rounds": math.inf, "curves": {}, "filter": [0.0] * 5, "further": [4.0, 4.0]},
        {"rounds": 1, "curves": {"chain": [10**400]}, "filter": [0.0] * 5, "further": [4.0, 4.0]},
    ],
)
def test_anything_else_is_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="nothing known of drafts"):
        Acceptance.from_dict(raw, BLOCK, N_NODES)
