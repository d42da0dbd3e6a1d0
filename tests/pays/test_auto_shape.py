"""Chains, trees or neither: what is chosen on machines that are made up, for drafts as recorded."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from dflash_local.bench.replay.recorded import RecordedDrafts
from dflash_local.draft.draft import Candidates, Draft
from dflash_local.draft.shape import Chain, DraftShape, Shape, Tree
from dflash_local.draft.tree import grow
from dflash_local.engine.accept import accept
from dflash_local.pays.controller import Controller
from dflash_local.pays.costs import Costs
from dflash_local.pays.policy import Policy

BLOCK, N_NODES, N_VOCAB, DEPTH = 16, 63, 1 << 20, 256
OTHER = 8
"""A token that is no candidate; candidates are the tokens 0 .. 7."""
CHAIN, TREE = Chain(BLOCK - 1), Tree(N_NODES, N_NODES + 1)
SHAPES: dict[str, list[Shape]] = {"chain": [CHAIN], "tree": [TREE], "auto": [CHAIN, TREE]}


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of a pass by rows, of a draft, of a new graph, and what a tree costs more."""

    steps: dict[int, float]
    draft: float
    switch: float = 5.9
    fork: float = 0.1
    name: str = ""

    def costs(self) -> Costs:
        steps = {DEPTH: {n: ms / 1e3 for n, ms in self.steps.items()}}
        drafts = {DEPTH: {1: self.draft / 1e3}}
        return Costs(steps, drafts, switch_s=self.switch / 1e3, trees={0: self.fork / 1e3})


MACHINES = {
    "H200, 8B in Q4_K_M": Machine(
        {1: 3.83, 2: 4.35, 4: 5.73, 8: 8.52, 9: 7.92, 16: 8.33, 24: 9.15, 32: 10.16, 64: 14.0}, 2.0
    ),
    "H200, 8B in BF16": Machine({1: 4.97, 8: 7.92, 16: 8.64, 31: 8.64, 32: 7.41, 64: 8.43}, 2.0),
    "by the row": Machine({1: 4.0, 2: 8.0, 64: 256.0}, 3.0),
    "trees are dear": Machine({1: 4.0, 8: 5.0, 16: 6.0, 64: 9.0}, 1.0, fork=8.0),
    "laptop": Machine({1: 22.0, 2: 24.0, 4: 28.0, 8: 40.0, 16: 60.0, 64: 200.0}, 4.0, switch=0.5),
}
ON_THE_WAY = (0.35, 0.65)
"""Of the cost of new graphs, by passes: built with the first, recorded with the next."""


@dataclass
class Played:
    tokens: int = 0
    seconds: float = 0.0
    widths: list[int] = field(default_factory=list)
    tree_rounds: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def play(
    machine: Machine,
    controller: Controller | None,
    shape: DraftShape,
    *,
    width: int | None = None,
    n_answers: int = 8,
) -> Played:
    """Answers through the passages recorded; without a controller, plainly or with fixed trees."""
    known = RecordedDrafts.shipped()
    truth, played = machine.costs(), Played()
    last, made = (1, "chain"), 0
    for answer in range(n_answers):
        policy = controller.open(DEPTH, shapes=SHAPES[shape]) if controller else None
        for passage in range(4):
            at, place = 0, (4 * answer + passage) % known.n_passages
            while at < known.n_tokens:
                n_draft = BLOCK - 1 if width else 0
                if controller and policy:
                    (n_draft,) = controller.n_drafts([policy], [N_NODES])
                kind = policy.shape.name if policy else shape
                draft = Draft.chain([])
                candidates = _candidates(known, place, at)
                if n_draft:
                    draft = _draft(candidates, policy, kind)
                    rows = width or 1
                    if controller and policy:
                        (rows,) = controller.rows(controller.chances([policy], [draft], [N_NODES]))
                    draft = draft.clip(rows - 1)
                ranks = known.ranks[place, at].tolist()
                tokens = iter([*ranks, OTHER])
                verdict = accept(draft, lambda _row, it=tokens: next(it), lambda _token: False)
                passed = 1 + len(draft), kind if draft else "chain"
                verify_s = truth.step_s(passed[0], DEPTH, passed[1])
                made = made + 1 if passed == last else 0
                verify_s += truth.switch_s * (ON_THE_WAY[made] if made < 2 else 0.0)
                last = passed
                draft_s = truth.draft_s(1, DEPTH) if n_draft else 0.0
                if controller and policy:
                    if draft:
                        controller.observe(policy, draft, verdict.tokens)
                    controller.observe_round(
                        *passed, int(n_draft > 0), DEPTH, draft_s, verify_s, 1e-5
                    )
                played.tokens += len(verdict.tokens)
                played.seconds += draft_s + verify_s
                played.widths.append(passed[0])
                played.tree_rounds += passed[1] == "tree"
                at += len(verdict.tokens)
    return played


def _candidates(known: RecordedDrafts, place: int, at: int) -> Candidates:
    ids = np.tile(np.arange(8, dtype=np.int32), (BLOCK - 1, 1))
    return Candidates(ids, known.logprobs[place, at])


def _draft(candidates: Candidates, policy: Policy | None, shape: str) -> Draft:
    if shape == "chain":
        firsts = candidates.logprobs[:, 0].tolist()
        return Draft.chain([0] * len(firsts), firsts, candidates)
    rated = policy.rate(candidates) if policy else candidates
    return replace(grow(rated, N_NODES, N_VOCAB), candidates=candidates)


@functools.cache
def fixed(name: str, shape: DraftShape, width: int) -> float:
    return play(MACHINES[name], None, shape, width=width).rate


@functools.cache
def best(name: str, shape: DraftShape) -> float:
    """Of all fixed widths, and of plain decoding."""
    widths = (2, 4, 8, 9, 16) if shape == "chain" else (4, 8, 9, 16, 24, 32, 64)
    plain = play(MACHINES[name], None, "chain").rate
    return max(plain, *(fixed(name, shape, width) for width in widths))


def controller(name: str, n_nodes: int = N_NODES) -> Controller:
    return Controller(MACHINES[name].costs(), BLOCK, n_nodes=n_nodes)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MACHINES)
def test_what_is_chosen_is_near_the_best_of_all(name: str) -> None:
    """Knowing nothing at first, and again after other answers of the kind."""
    most = max(best(name, "chain"), best(name, "tree"))
    chooses = controller(name)
    cold = play(MACHINES[name], chooses, "auto")
    seeded = play(MACHINES[name], chooses, "auto")
    told = (
        f"{name}: best chain {best(name, 'chain'):.1f}, tree {best(name, 'tree'):.1f}, chosen "
        f"{cold.rate:.1f}, later {seeded.rate:.1f}; trees in {seeded.tree_rounds} of "
        f"{len(seeded.widths)} rounds"
    )
    print(told)
    assert cold.rate > 0.9 * most, told
    assert seeded.rate > 0.94 * most, told


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MACHINES)
def test_each_shape_is_near_its_best_width(name: str) -> None:
    shapes: tuple[DraftShape, ...] = ("chain", "tree")
    for shape in shapes:
        chooses = controller(name)
        play(MACHINES[name], chooses, shape)
        found = play(MACHINES[name], chooses, shape).rate
        assert found > 0.94 * best(name, shape), (name, shape, found, best(name, shape))


def test_trees_where_they_pay_and_chains_where_not() -> None:
    for name, pays in (("H200, 8B in BF16", True), ("trees are dear", False)):
        chooses = controller(name)
        play(MACHINES[name], chooses, "auto")
        found = play(MACHINES[name], chooses, "auto")
        assert (found.tree_rounds > 0.8 * len(found.widths)) == pays, (name, found.tree_rounds)
    assert play(MACHINES["by the row"], controller("by the row"), "auto").tree_rounds < 8


def test_where_wider_is_cheaper_trees_are_that_wide() -> None:
    chooses = controller("H200, 8B in BF16")
    play(MACHINES["H200, 8B in BF16"], chooses, "tree")
    found = play(MACHINES["H200, 8B in BF16"], chooses, "tree")
    assert np.mean([width >= 32 for width in found.widths]) > 0.9


def test_chains_tell_what_trees_would_be_worth_and_the_other_way_round() -> None:
    """In answers of one shape alone, what the other is thought to be worth is what it would be."""
    name = "H200, 8B in Q4_K_M"
    lengths = {}
    for shape in ("chain", "tree"):
        found = []
        chooses = controller(name)
        policy = chooses.open(DEPTH, shapes=SHAPES["auto"])
        policy.take(shape)
        known = RecordedDrafts.shipped()
        for at in range(0, 1000, 4):
            place, token = divmod(at, known.n_tokens)
            candidates = _candidates(known, place % known.n_passages, token)
            draft = _draft(candidates, policy, shape)
            policy.chances(draft, N_NODES, early=False)
            policy.rounds += 1
            ranks = known.ranks[place % known.n_passages, token].tolist()
            chooses.observe(policy, draft, [*ranks, OTHER])
            found.append([])
            for each in ("chain", "tree"):
                policy.take(each)
                found[-1].append(sum(policy.typical()))
            policy.take(shape)
        lengths[shape] = np.mean(found[50:], axis=0)
    assert lengths["chain"] == pytest.approx(lengths["tree"], rel=0.05)
    chain, tree = lengths["chain"]
    assert tree > 1.2 * chain
