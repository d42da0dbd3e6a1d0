"""Width "auto" with drafters that know all, nothing, or break their promises; and what the drafter
gets of a text that was long decoded plainly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

import pytest

import tiny_coder
from add_up import N_NODES, add_up
from adversarial import Script, ScriptedDrafter, oracle, right_for
from dflash_local.draft.draft import Draft
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.target_model.target import Target
from elsewhere import DECIDERS, controller
from pair_engine import answer, consistent, fused_drafter, open_target
from pairwise import pairwise_cases
from plain_answer import PlainAnswer
from shapes import assert_as_well_drafted, exact_target

pytestmark = pytest.mark.usefixtures("as_far_ahead_as_allowed")
N = 48
SEEDED = {"temperature": 0.8, "seed": 5, "repeat_penalty": 1.1}


class Known(PlainAnswer):
    """To be drafted with the width "auto"."""

    def check(self, drafter: ScriptedDrafter, decider: str) -> Sequence:
        """The answer of width "auto" from empty caches: equal, with stats that add up."""
        engine = Engine(self.target, drafter, 1, controller(decider))
        engine.slots.forget_all()
        drafted = self.asked(engine, "auto")
        add_up(drafted)
        if not engine.slots[0].gave_up:
            consistent(engine, drafter, len(self.text) - 1)
        return drafted


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target() as opened:
        yield opened


@pytest.fixture(scope="module")
def known_of(target: Target) -> Callable[[str], Known]:
    """By the way it is drawn, each decoded once."""
    prompt = target.vocabulary.tokenize(tiny_coder.prompts()["chat"][0])

    @cache
    def known(way: str) -> Known:
        return Known(target, prompt, N, **(SEEDED if way == "seeded" else {}))

    return known


Scripting = Callable[[Known], Script]


def right_for_so_many(n: Callable[[], int]) -> Scripting:
    return lambda known: right_for(known.text, n, known.target.n_vocab)


def right_but(change: Callable[[list[int]], Draft]) -> Scripting:
    """The right draft, changed."""

    def scripted(known: Known) -> Script:
        know = oracle(known.text)
        return lambda at, anchor, n: change(know(at, anchor, n).tokens)

    return scripted


def with_at(bad: int, at: int) -> Callable[[list[int]], Draft]:
    """Such a draft ends before the bad token."""
    return lambda tokens: Draft.chain([bad if i == at else t for i, t in enumerate(tokens)])


def with_logprobs(logprob: float) -> Callable[[list[int]], Draft]:
    return lambda tokens: Draft.chain(tokens, [logprob] * len(tokens))


def of_length(length: Callable[[int], int]) -> Scripting:
    """Not as long as it was asked for."""

    def scripted(known: Known) -> Script:
        know = oracle(known.text)
        return lambda at, anchor, n: know(at, anchor, length(n))

    return scripted


made = count()
SCRIPTS: dict[str, tuple[Scripting, int]] = {
    "right": (lambda known: oracle(known.text), 16),
    "wrong": (right_for_so_many(lambda: 0), 1),
    "right for 1": (right_for_so_many(lambda: 1), 2),
    "right for 3": (right_for_so_many(lambda: 3), 4),
    "right for 7": (right_for_so_many(lambda: 7), 8),
    "right for another number each round": (right_for_so_many(lambda: next(made) * 7 % 16), 16),
    **{
        f"log-probabilities of {logprob}": (right_but(with_logprobs(logprob)), 16)
        for logprob in (math.nan, math.inf, -math.inf, 5.0, -1e30)
    },
    **{
        f"{bad} at {at}": (right_but(with_at(bad, at)), at + 1)
        for bad in (-1, 2**31 - 1)
        for at in (0, 3)
    },
    "nothing": (of_length(lambda n: 0), 1),
    "two tokens": (of_length(lambda n: 2), 3),
    "too many": (of_length(lambda n: 3 * n + 5), 16),
}
"""The drafts, and the most tokens that a round emits by them."""
EVERYWHERE = ("right", "wrong", "right for 7", "right for another number each round")
ELSEWHERE = [name for name in SCRIPTS if name not in EVERYWHERE]
CASES = [
    *pairwise_cases(EVERYWHERE, DECIDERS, ("greedy", "seeded")),
    *pairwise_cases(ELSEWHERE, ("cheap", "even", "by lot"), ("greedy", "seeded")),
]


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("name", "decider", "way"), CASES)
def test_whatever_is_drafted(
    known_of: Callable[[str], Known], name: str, decider: str, way: str
) -> None:
    known = known_of(way)
    script, most = SCRIPTS[name]
    stats = known.check(ScriptedDrafter(script(known)), decider).stats
    assert max(stats.accepted_lengths) <= most
    if name == "right":
        assert stats.accepted == stats.drafted
        if decider == "cheap":  # at full width nearly from the start
            assert stats.rounds < N / 8
    if name == "wrong" and decider not in ("cheap", "by lot"):
        assert stats.widths[1] > N / 2  # it is sure of each draft, and found out


@pytest.mark.one_in(24)
@pytest.mark.parametrize("n", [1, 2, 14, 15, 16, 17])
@pytest.mark.parametrize("decider", ["cheap", "by the row", "hopeless", "by lot"])
def test_an_end_of_text_at_every_place_of_a_block(target: Target, decider: str, n: int) -> None:
    # A digit is a token of its own, so the answer ends after n tokens.
    prompt = target.vocabulary.tokenize("x = ")
    known = Known(target, prompt, N, grammar=f"root ::= [0-9]{{{n}}}")
    assert len(known.tokens) == n + 1 and known.finish_reason == "stop"

    def script(anchor_at: int, anchor: int, n_draft: int) -> Draft:
        tokens = known.text[anchor_at + 1 : anchor_at + 1 + n_draft]
        return Draft.chain(tokens + known.tokens[-1:] * (n_draft - len(tokens)))

    known.check(ScriptedDrafter(script), decider)


# What the drafter learns later of plain steps


@pytest.fixture(scope="module")
def long_answers(shape: DraftShape, either_file: Path) -> Iterator[Callable[[int], Known]]:
    """By the length of the prompt. The target stores 192 rows, fewer than there are tokens."""
    with exact_target(shape, either_file, n_ctx=1024, n_batch=64) as target:
        assert target.native.n_stored == 192
        source = "\n".join(tiny_coder.prompts()["code"] + tiny_coder.prompts()["chat"])
        tokens = target.vocabulary.tokenize(source)

        @cache
        def known(n_prompt: int) -> Known:
            found = Known(target, tokens[:n_prompt], 205)
            assert len(found.tokens) > 200
            return found

        yield known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "decider", "n_prompt"),
    [
        ("chain", "hopeless", 193),
        ("chain", "probing", 40),
        ("chain", "by lot", 193),
        pytest.param("chain", "probing", 193, marks=pytest.mark.slow),
        *(pytest.param("chain", "by lot", n, marks=pytest.mark.slow) for n in (40, 192, 400)),
        pytest.param("tree", "by lot", 193, marks=pytest.mark.slow),
    ],
    indirect=["shape"],
    scope="module",
)
def test_rows_reach_the_drafter_before_they_are_overwritten(
    long_answers: Callable[[int], Known], shape: DraftShape, decider: str, n_prompt: int
) -> None:
    """Drafts after all that are those from an empty cache, whether the prompt alone or the answer
    is of more rows than the store holds, plain or drafted."""
    known = long_answers(n_prompt)
    drafter = fused_drafter(known.target)
    asked, n_nodes = ("auto", N_NODES) if shape == "tree" else (shape, 0)
    engine = Engine(known.target, drafter, 1, controller(decider, n_nodes))
    engine.slots.forget_all()
    first = known.ask(engine, "auto", shape=asked)
    assert first.tokens == known.tokens
    assert (first.stats.tree_rounds > 0) == (shape == "tree")
    if not engine.slots[0].gave_up:
        consistent(engine, drafter, len(known.text) - 1)
    held = drafter.length(0)
    if decider == "hopeless":  # nor is the drafter told of what it will not be asked for
        assert held <= n_prompt
    warm = answer(engine, known.text, 16, 12, shape=shape)
    assert warm.stats.cached_tokens == held
    engine.slots.forget_all()
    cold = answer(engine, known.text, 16, 12, shape=shape)
    assert warm.tokens == cold.tokens
    if shape == "chain":
        assert warm.stats.outcomes == cold.stats.outcomes
    else:
        assert_as_well_drafted(warm.stats, cold.stats)
