"""Trees that no drafter would make, and requests that come and go, in a target whose trees round as
little as can be (see `shapes`)."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from dflash_local.draft.draft import ANCHOR, Draft
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.errors import InputError
from dflash_local.target_model.batch import Batch
from dflash_local.target_model.target import Target
from pair_engine import answer, fused_drafter, open_target, request
from plain_answer import PlainAnswer
from shapes import NOISE, exact_file

N = 32
BRANCHES = 32
"""Too few for each row of the widest trees."""


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """Four slots that may fork."""
    options = {"kv_type": "f32", "flash_attn": False, "n_branches": BRANCHES}
    with open_target(exact_file("tree"), n_ctx=1024, n_seq=4, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def known(target: Target) -> list[PlainAnswer]:
    prompts = tiny_coder.prompts()
    return [PlainAnswer(target, text, N) for text in [*prompts["code"][:2], *prompts["chat"][1:3]]]


@pytest.fixture
def engine(target: Target) -> Iterator[Engine]:
    opened = Engine(target, fused_drafter(target), 4)
    opened.slots.forget_all()
    yield opened
    opened.slots.forget_all()


@pytest.mark.slow
def test_all_ids_stay_in_step_whatever_becomes_of_requests(
    engine: Engine, known: list[PlainAnswer]
) -> None:
    """Slots come and go with chains and trees, greedy and sampled, shared and cancelled."""
    rng = Random(5)
    live: list[Sequence] = []
    n_ended = 0
    for _ in range(50):
        while len(live) < 4 and rng.random() < 0.6:
            prompt = rng.choice(known).prompt[: rng.randrange(5, 40)]
            shape: DraftShape = rng.choice(("tree", "chain"))
            width = rng.choice((0, 4, 9, 16, 33 if shape == "tree" else 12))
            heat = rng.choice((0.0, 0.9))
            live.append(
                engine.begin(
                    request(prompt, width, rng.randrange(5, 40), shape=shape, temperature=heat)
                )
            )
        if live and rng.random() < 0.15:
            rng.choice(live).cancelled.set()
        engine.step(live)
        for sequence in [s for s in live if s.finish_reason is not None]:
            engine.end(sequence)
            live.remove(sequence)
            assert sequence.error is None
            n_ended += 1
    for sequence in live:
        engine.end(sequence)
    assert n_ended > 10
    for slot in engine.slots:
        _, *children = on_every_branch(engine.target, slot.seq, 11, len(slot.cached))
        assert max(abs(child - children[0]).max() for child in children) <= NOISE
        assert engine.target.truncate(slot.seq, len(slot.cached))


def on_every_branch(
    target: Target, seq: int, anchor: int, length: int
) -> list[NDArray[np.float32]]:
    """Logits after an anchor, and after a token that follows it on each branch but the first."""
    n = BRANCHES - 1
    batch = Batch()
    part = batch.add_tree(seq, length, anchor, [11] * n, [ANCHOR] * n)
    target.run(batch)
    logits = [target.logits(row).copy() for row in range(1 + n)]
    target.keep(part, [0])
    return logits


def right_branch_last(right: list[int]) -> tuple[list[int], list[int]]:
    """Three wrong branches first, each as long."""
    tokens: list[int] = []
    parents: list[int] = []
    for shift in (3, 2, 1, 0):
        parent = ANCHOR
        for token in right[:4]:
            parents.append(parent)
            parent = len(tokens)
            tokens.append(token + shift)
    return tokens, parents


def all_wrong(right: list[int]) -> tuple[list[int], list[int]]:
    return [right[0] + 1, right[0] + 2, right[0] + 1], [ANCHOR, ANCHOR, 0]


def duplicate_siblings(right: list[int]) -> tuple[list[int], list[int]]:
    """The right token twice; only below the second the draft is right further on."""
    second = right[1] if len(right) > 1 else 0
    return [right[0], right[0], second, second], [ANCHOR, ANCHOR, 1, 0]


def deeper_than_the_block(right: list[int]) -> tuple[list[int], list[int]]:
    """A long chain, with a wrong token before each of its first ones."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = ANCHOR
    for depth, token in enumerate(right[:24]):
        siblings = [token + 1, token] if depth < 8 else [token]
        tokens += siblings
        parents += [parent] * len(siblings)
        parent = len(tokens) - 1
    return tokens, parents


def outside(right: list[int]) -> tuple[list[int], list[int]]:
    """Ids that are none, with right ones below and beside them."""
    return [-1, right[0], 10**6, right[0]], [ANCHOR, 0, ANCHOR, ANCHOR]


ADVERSARIAL = {
    right_branch_last: 4,
    all_wrong: 0,
    duplicate_siblings: 2,
    deeper_than_the_block: 24,
    outside: 1,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("build", ADVERSARIAL, ids=lambda build: build.__name__)
def test_whatever_the_tree_is(known: list[PlainAnswer], build: Any) -> None:
    run = known[1]

    def script(anchor_at: int, anchor: int, _n: int) -> Draft:
        assert run.text[anchor_at] == anchor
        right = run.text[anchor_at + 1 :]
        return Draft(*build(right)) if right else Draft.chain([])

    accepted = run.scripted(script, 64, shape="tree").accepted_lengths
    assert max(accepted) <= 1 + ADVERSARIAL[build]
    assert accepted[min(1 + ADVERSARIAL[build], N - 1)] > 0


def test_an_end_of_text_on_a_side_branch_ends_nothing(
    target: Target, known: list[PlainAnswer]
) -> None:
    run, end = known[0], target.vocabulary.ends[0]

    def script(anchor_at: int, _anchor: int, _n: int) -> Draft:
        right = run.text[anchor_at + 1 : anchor_at + 4]
        if not right:
            return Draft.chain([])
        # The end of text first, with something after it, and beside each right token.
        tokens, parents, parent = [end, right[0]], [ANCHOR, 0], ANCHOR
        for token in right:
            tokens += [token, end]
            parents += [parent, parent] if parent != ANCHOR else [ANCHOR, 1]
            parent = len(tokens) - 2
        return Draft(tokens, parents)

    assert run.scripted(script, shape="tree").accepted > 0


# What cannot fork


def test_too_wide_a_tree_is_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="a draft tree allows at most 64"):
        engine.begin(request([1], 65, N, shape="tree"))
    with pytest.raises(InputError, match="this drafter's block allows at most 16"):
        engine.begin(request([1], 17, N, shape="chain"))


def test_without_ids_drafts_are_chains_and_it_is_said() -> None:
    with open_target() as target:
        drafter = fused_drafter(target)
        assert drafter.top_k == 1
        engine = Engine(target, drafter)
        prompt = target.vocabulary.tokenize(tiny_coder.prompts()["code"][0])
        drafted = answer(engine, prompt, 16, N, shape="tree")
        assert drafted.stats.drafted and not drafted.stats.tree_rounds
        assert "drafts are chains" in (drafted.stats.drafting or "")
        assert "drafts are chains" not in (answer(engine, prompt, 16, N).stats.drafting or "")
