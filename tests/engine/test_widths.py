"""Width "auto": whatever the controller decides, when and how often, answers are the plain ones.

As of fixed widths: chains to the bit, trees as near as rounding is (see `shapes`); of several
sequences by the gap rule.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

import tiny_coder
from add_up import LOT, N_NODES, add_up
from dflash_local import Model
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.target_model.target import Target
from elsewhere import DECIDERS, Fickle, controller
from pair_engine import answer, consistent, fused_drafter, request
from sampling_ways import WAYS as SAMPLED
from shapes import assert_close, exact_target, of_both_shapes

pytestmark = pytest.mark.usefixtures("as_far_ahead_as_allowed")
N = 24
WAYS = {**SAMPLED, "with log-probabilities": {"logprobs": 1}}


class Pair:
    """The mini pair on the CPU, and what plain decoding answers."""

    def __init__(
        self, target: Target, drafter: FusedDrafter, other: Target, shape: DraftShape
    ) -> None:
        """`shape` is what requests ask for."""
        self.target, self.drafter, self.shape = target, drafter, shape
        self._other = other  # so that plain answers leave the caches as they are
        self._known: dict[str, Sequence] = {}

    def tokens(self, text: str) -> list[int]:
        return self.target.vocabulary.tokenize(text)

    def plain(self, prompt: list[int], max_tokens: int = N, **params: Any) -> Sequence:
        """Step by step from empty caches, by the logits on the host."""
        key = repr((prompt, max_tokens, params))
        if key not in self._known:
            bare = Engine(self._other, None)
            self._known[key] = answer(bare, prompt, 0, max_tokens, **{"logprobs": 1, **params})
            bare.slots.forget_all()
        return self._known[key]

    @property
    def n_nodes(self) -> int:
        return 0 if self.shape == "chain" else N_NODES

    def engine(self, decider: str | Fickle) -> Engine:
        """With empty caches."""
        chosen = controller(decider, self.n_nodes) if isinstance(decider, str) else decider
        engine = Engine(self.target, self.drafter, 1, chosen)
        engine.slots.forget_all()
        return engine

    def answer(
        self, engine: Engine, prompt: list[int], width: Any, n: int, **params: Any
    ) -> Sequence:
        return answer(engine, prompt, width, n, shape=self.shape, **params)

    def check(self, engine: Engine, prompt: list[int], n: int = N, **params: Any) -> Sequence:
        """An answer of width "auto": the plain one, with stats that add up and caches in step."""
        sequence = self.answer(engine, prompt, "auto", n, **params)
        plain = self.plain(prompt, n, **params)
        assert sequence.tokens == plain.tokens
        assert sequence.finish_reason == plain.finish_reason
        if params.get("logprobs"):
            assert_close(sequence.logprobs, plain.logprobs)
            assert sequence.stats.tree_rounds or sequence.logprobs == plain.logprobs
        add_up(sequence)
        self.in_step(engine, [*prompt, *sequence.tokens])
        return sequence

    def in_step(self, engine: Engine, text: list[int]) -> None:
        """Both caches have all of the text but its last token; after a request that was done with
        drafting, the drafter's has the first part of it."""
        (slot,) = engine.slots
        assert slot.cached == text[:-1] and not slot.pending
        if slot.gave_up:
            assert self.drafter.length(0) <= len(slot.cached)
        else:
            consistent(engine, self.drafter, len(text) - 1)


@pytest.fixture(scope="module")
def pair(shape: DraftShape) -> Iterator[Pair]:
    """A pair; the controller may choose trees, if there are any."""
    with exact_target(shape, n_ctx=2048) as target, exact_target(shape, n_ctx=2048) as other:
        yield Pair(target, fused_drafter(target), other, "auto" if shape == "tree" else "chain")


@pytest.fixture
def prompts(pair: Pair) -> list[list[int]]:
    known = tiny_coder.prompts()
    return [pair.tokens(text) for text in (known["chat"][0], known["code"][0])]


only_chains = pytest.mark.parametrize("shape", ["chain"], indirect=True)


@pytest.mark.one_in(18)
@of_both_shapes("decider, way", product(DECIDERS, WAYS), product(LOT, WAYS))
def test_answers_are_the_plain_ones(
    pair: Pair, prompts: list[list[int]], decider: str, way: str
) -> None:
    engine = pair.engine(decider)
    for prompt in prompts if way == "greedy" else prompts[:1]:
        pair.check(engine, prompt, **WAYS[way])


@pytest.mark.slow
@only_chains
def test_the_machines_do_what_they_are_here_for(pair: Pair, prompts: list[list[int]]) -> None:
    """Else the answers above would say little."""
    seen: dict[str, dict[int, int]] = {}
    gave_up: dict[str, bool] = {}
    for decider in DECIDERS:
        engine = pair.engine(decider)
        stats = pair.check(engine, prompts[1], 96, temperature=0.8, seed=3).stats
        seen[decider], gave_up[decider] = stats.widths, engine.slots[0].gave_up
    assert 1 not in seen["cheap"] and len(seen["cheap"]) > 4
    assert len(seen["by the row"]) > 3
    assert seen["even"][1] > 9 and len(seen["even"]) > 2  # in one answer, plain and drafted
    assert seen["by lot"][1] > 9 and len(seen["by lot"]) > 4
    assert seen["probing"][1] > 48 and len(seen["probing"]) > 1
    assert seen["resigning"][1] > 48 and len(seen["resigning"]) > 1
    assert list(seen["hopeless"]) == [1]
    assert {name for name, off in gave_up.items() if off} == {"resigning", "hopeless"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tree"], indirect=True)
def test_trees_are_among_what_they_do(pair: Pair, prompts: list[list[int]]) -> None:
    for decider in ("cheap", "by lot"):  # where rows have a price, chains are taken
        stats = pair.check(pair.engine(decider), prompts[1], 48).stats
        assert stats.tree_rounds > 3, decider
    n_drafted = sum(n for width, n in stats.widths.items() if width > 1)
    assert stats.tree_rounds < n_drafted  # by lot some are chains


@pytest.mark.one_in(2)
def test_chances_alone_switch_as_they_like(pair: Pair, prompts: list[list[int]]) -> None:
    for seed in range(3):
        resigns = 0.05 * (seed % 3)
        engine = pair.engine(Fickle(seed, resigns=resigns, n_nodes=pair.n_nodes))
        for prompt in prompts:
            pair.check(engine, prompt)


# Ends


@pytest.mark.one_in(8)
@of_both_shapes("decider", ["cheap", "even", "probing", "hopeless", "by lot"], LOT)
def test_stop_texts_are_found_wherever_they_come(pair: Pair, decider: str) -> None:
    prompt = tiny_coder.prompts()["code"][0]
    expected = pair.plain(pair.tokens(prompt)).tokens
    text = pair.target.vocabulary.detokenize(expected)
    stops = [text[at : at + 3] for at in range(5, 60, 11)]
    chosen = controller(decider, pair.n_nodes)
    model = Model(Engine(pair.target, pair.drafter, controller=chosen))
    model.draft_shape = pair.shape
    model.forget()
    for stop in stops:
        result = model.generate(prompt, max_tokens=N, stop=stop)
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason == "stop"
        assert result.tokens == expected[: len(result.tokens)]
        # The last token is one that brings the stop text, and none comes after it.
        before = pair.target.vocabulary.detokenize(result.tokens[:-1])
        assert stop in pair.target.vocabulary.detokenize(result.tokens) and stop not in before
        ended = [*pair.tokens(prompt), *result.tokens]
        pair.in_step(model.engine, ended)
        # Nothing is left of what was decoded beyond: the next answer goes on from there.
        assert model.generate(ended, max_tokens=4).tokens == pair.plain(ended, 4).tokens


@pytest.mark.one_in(8)
@of_both_shapes("decider", DECIDERS, LOT)
def test_a_cancelled_answer_leaves_the_next_one_right(
    pair: Pair, prompts: list[list[int]], decider: str
) -> None:
    engine = pair.engine(decider)
    expected = pair.plain(prompts[0], 40).tokens
    for n in (1, 2, 9, 17):
        sequence = engine.begin(request(prompts[0], "auto", 40, shape=pair.shape))
        while sequence.finish_reason is None:
            if len(sequence.tokens) >= n:
                sequence.cancelled.set()
            engine.step([sequence])
        engine.end(sequence)
        assert sequence.finish_reason == "cancelled"
        assert n <= len(sequence.tokens) < n + 17
        assert sequence.tokens == expected[: len(sequence.tokens)]
        add_up(sequence)
        pair.in_step(engine, [*prompts[0], *sequence.tokens])
    pair.check(engine, prompts[0])


# One request after another


@pytest.mark.slow
@of_both_shapes(
    "decider, first",
    [
        ("even", 16),
        ("probing", "auto"),
        ("resigning", 0),
        *(("by lot", first) for first in ("auto", 16, 0)),
    ],
    [("by lot", "auto")],
)
def test_a_request_after_another(
    pair: Pair, prompts: list[list[int]], decider: str, first: Any
) -> None:
    """That goes on where it ended, begins as it did, or is another one."""
    engine = pair.engine(decider)
    before = pair.answer(engine, prompts[1], first, N)
    whole = pair.plain(prompts[1]).tokens
    assert before.tokens == whole
    longer = [*prompts[1], *whole]
    for prompt in (longer, longer[:-20], prompts[0], longer):
        pair.check(engine, prompt, 17)
    plain = pair.plain(longer, 17).tokens
    assert pair.answer(engine, longer, 16, 17).tokens == plain
    consistent(engine, pair.drafter, len(longer) + len(plain) - 1)


@only_chains
def test_where_drafting_was_given_up_no_prompt_is_decoded_again(
    pair: Pair, prompts: list[list[int]]
) -> None:
    engine = pair.engine("hopeless")
    pair.check(engine, prompts[0], 40)
    assert engine.slots[0].gave_up and pair.drafter.length(0) == 0
    longer = [*prompts[0], *pair.plain(prompts[0], 40).tokens]
    assert pair.check(engine, longer).stats.cached_tokens == len(longer) - 1
    # A request that must draft pays for it once.
    sequence = answer(engine, longer, 16, N)
    assert sequence.tokens == pair.plain(longer).tokens
    assert sequence.stats.cached_tokens == 0 and sequence.stats.drafted > 0


@only_chains
def test_without_a_controller_auto_is_plain(pair: Pair, prompts: list[list[int]]) -> None:
    engine = Engine(pair.target, pair.drafter)
    engine.slots.forget_all()
    sequence = answer(engine, prompts[0], "auto", N)
    assert sequence.tokens == pair.plain(prompts[0]).tokens
    assert list(sequence.stats.widths) == [1]
    pair.in_step(engine, [*prompts[0], *sequence.tokens])
