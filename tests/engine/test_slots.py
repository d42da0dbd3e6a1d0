"""Slots: which one a request takes, and how all of them share the cells of the context."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

import tiny_coder
from add_up import N_NODES
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.errors import InputError
from elsewhere import controller
from pair_engine import answer as asked_of
from pair_engine import consistent, fused_drafter
from plain_answer import PlainAnswer
from shapes import assert_as_well_drafted, exact_target
from two_slots import N, answer, begin, text


def test_a_request_takes_the_slot_that_has_most_of_it(engine: Engine) -> None:
    long = text(engine, 90)
    other = engine.target.vocabulary.tokenize(tiny_coder.prompts()["chat"][0])
    engine.run([begin(engine, other, 16, 2), begin(engine, long, 16, 2)])
    assert engine.slots[1].cached[:90] == long
    sequence = begin(engine, long, 16, 2)
    assert sequence.slot.seq == 1
    assert sequence.stats.cached_tokens == 89
    engine.run([sequence])
    sequence = begin(engine, other, 16, 2)
    assert sequence.slot.seq == 0
    engine.run([sequence])


def test_every_slot_busy(engine: Engine) -> None:
    sequences = [begin(engine, [n], 0, 2) for n in (1, 2)]
    with pytest.raises(InputError, match="all 2 slots are busy"):
        begin(engine, [3], 0, 2)
    engine.run(sequences)
    assert len(answer(engine, [3], 0, 2).tokens) == 2


def test_idle_slots_make_room(engine: Engine) -> None:
    """Two prompts of 150 tokens do not fit 256 cells: the one that rests goes."""
    first, second = text(engine, 150), text(engine, 190)[40:]
    expected = [PlainAnswer(engine.target, prompt, N) for prompt in (first, second)]
    found = [answer(engine, prompt, 16, N) for prompt in (first, second, first)]
    assert [s.finish_reason for s in found] == ["length"] * 3
    assert found[2].stats.cached_tokens == 0
    # One sequence at a time, so to the bit.
    assert [s.tokens for s in found] == [expected[i].tokens for i in (0, 1, 0)]


@pytest.mark.parametrize("widths", [(0, 0), (16, 16), (16, 3)], ids=str)
def test_two_at_once_share_the_context_to_its_last_cell(
    engine: Engine, widths: tuple[int, int]
) -> None:
    ends = [t for t in range(engine.target.n_vocab) if engine.target.vocabulary.ends_text(t)]
    bias = dict.fromkeys(ends, -float("inf"))
    prompts = [text(engine, 100), text(engine, 120)[30:]]
    sequences = [
        begin(engine, prompt, width, None, logit_bias=bias)
        for prompt, width in zip(prompts, widths, strict=True)
    ]
    engine.run(sequences)
    assert [s.finish_reason for s in sequences] == ["length", "length"]
    assert sum(len(slot.cached) for slot in engine.slots) == engine.target.n_ctx
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.slot.cached == [*prompt, *sequence.tokens[:-1]]
        assert engine.drafter is not None
        if sequence.request.drafts:
            assert engine.drafter.length(sequence.slot.seq) == len(sequence.slot.cached)


# What the drafter learns later of plain steps


@pytest.fixture(scope="module")
def long_answers(shape: DraftShape) -> Iterator[Callable[[int], PlainAnswer]]:
    """By the length of the prompt. The target stores 192 rows, fewer than there are tokens."""
    with exact_target(shape, n_ctx=1024, n_batch=64) as target:
        assert target.native.n_stored == 192
        source = "\n".join(tiny_coder.prompts()["code"] + tiny_coder.prompts()["chat"])
        tokens = target.vocabulary.tokenize(source)

        @cache
        def known(n_prompt: int) -> PlainAnswer:
            found = PlainAnswer(target, tokens[:n_prompt], 205)
            assert len(found.tokens) > 200
            return found

        yield known


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("as_far_ahead_as_allowed")
@pytest.mark.parametrize(
    ("shape", "decider", "n_prompt"),
    [
        ("chain", "hopeless", 193),
        ("chain", "probing", 40),
        ("chain", "by lot", 193),
        ("chain", "probing", 193),
        *(("chain", "by lot", n) for n in (40, 192, 400)),
        ("tree", "by lot", 193),
    ],
    indirect=["shape"],
    scope="module",
)
def test_rows_reach_the_drafter_before_they_are_overwritten(
    long_answers: Callable[[int], PlainAnswer], shape: DraftShape, decider: str, n_prompt: int
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
    warm = asked_of(engine, known.text, 16, 12, shape=shape)
    assert warm.stats.cached_tokens == held
    engine.slots.forget_all()
    cold = asked_of(engine, known.text, 16, 12, shape=shape)
    assert warm.tokens == cold.tokens
    if shape == "chain":
        assert warm.stats.outcomes == cold.stats.outcomes
    else:
        assert_as_well_drafted(warm.stats, cold.stats)
