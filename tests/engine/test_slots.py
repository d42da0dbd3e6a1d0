"""Slots: which one a request takes, and how all of them share the cells of the context."""

from __future__ import annotations

import pytest

import tiny_coder
from dflash_local.engine.engine import Engine
from dflash_local.errors import InputError
from plain_answer import PlainAnswer
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


@pytest.mark.slow
def test_idle_slots_make_room(engine: Engine) -> None:
    """Two prompts of 150 tokens do not fit 256 cells: the one that rests goes."""
    first, second = text(engine, 150), text(engine, 190)[40:]
    expected = [PlainAnswer(engine.target, prompt, N) for prompt in (first, second)]
    found = [answer(engine, prompt, 16, N) for prompt in (first, second, first)]
    assert [s.finish_reason for s in found] == ["length"] * 3
    assert found[2].stats.cached_tokens == 0
    # One sequence at a time, so to the bit.
    assert [s.tokens for s in found] == [expected[i].tokens for i in (0, 1, 0)]


@pytest.mark.one_in(8)
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
