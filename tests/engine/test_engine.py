"""Requests that join, leave, fail, end and are suspended: the others' answers stay the same."""

import pytest

from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.errors import InputError
from gap_rule import equal_by_gap_rule, joint_noise
from pair_engine import fused_drafter, open_target
from plain_answer import PlainAnswer
from shapes import NOISE, exact_target
from two_slots import N, answer, begin, text


def assert_equal(engine: Engine, expected: list[PlainAnswer], found: list[Sequence]) -> None:
    for slot in engine.slots:
        assert not slot.busy
    engine.slots.forget_all()
    prompts, tokens = [p.prompt for p in expected], [p.tokens for p in expected]
    widths = [s.request.draft_width for s in found]

    def noise() -> float:
        joint = joint_noise(engine.target, prompts, tokens, widths)
        return max(joint, NOISE if engine.takes_trees else 0.0)

    for plain, sequence in zip(expected, found, strict=True):
        equal_by_gap_rule(plain.tokens, plain.logprobs, sequence.tokens, noise)


def test_a_failing_request_leaves_the_engine_usable(engine: Engine) -> None:
    """Bias forbids every token of the vocabulary: found out with the first row of logits."""
    prompt = text(engine, 40)
    expected = answer(engine, prompt, 16, N).tokens
    nothing = dict.fromkeys(range(engine.target.n_vocab), -float("inf"))
    with pytest.raises(InputError, match="leave no token"):
        answer(engine, prompt, 16, N, logit_bias=nothing)
    assert [slot.busy for slot in engine.slots] == [False, False]
    assert answer(engine, prompt, 16, N).tokens == expected


def test_ending_twice_and_early(engine: Engine) -> None:
    prompt = text(engine, 40)
    expected = answer(engine, prompt, 16, N).tokens
    sequence = begin(engine, prompt, 16, N)
    engine.end(sequence)
    engine.end(sequence)
    assert sequence.finish_reason == "cancelled"
    assert answer(engine, prompt, 16, N).tokens == expected


def test_batches_smaller_than_the_drafts_of_all(engine: Engine, shape: DraftShape) -> None:
    """Nine rows a batch: two drafts of 16 are cut to what a pass can verify."""
    prompts = [text(engine, 30), text(engine, 50)[20:]]
    expected = [PlainAnswer(engine.target, prompt, N) for prompt in prompts]
    with exact_target(shape, n_ctx=256, n_seq=2, n_batch=9) as target:
        narrow = Engine(target, fused_drafter(target), n_seq=2)
        found = [begin(narrow, prompt, 16, N) for prompt in prompts]
        narrow.run(found)
        assert sum(s.stats.drafted for s in found) > 0
    assert_equal(engine, expected, found)
    with (
        pytest.raises(InputError, match="n_batch is 3 with 4 sequences"),
        open_target(n_ctx=256, n_seq=4, n_batch=3),
    ):
        pass


def test_one_that_fails_leaves_the_others_alone(engine: Engine) -> None:
    prompts = [text(engine, 30), text(engine, 50)[20:]]
    expected = PlainAnswer(engine.target, prompts[0], N)
    first = begin(engine, prompts[0], 8, N)
    for _ in range(2):
        engine.step([first])
    nothing = dict.fromkeys(range(engine.target.n_vocab), -float("inf"))
    second = begin(engine, prompts[1], 8, N, logit_bias=nothing)
    with pytest.raises(InputError, match="leave no token"):
        engine.run([first, second])
    assert (second.tokens, second.slot.cached) == ([], [])
    assert first.error is None
    assert_equal(engine, [expected], [first])


def test_suspended_and_resumed_as_if_nothing_had_been(engine: Engine) -> None:
    """Alone, so to the bit: with its caches, and without."""
    prompt, options = text(engine, 40), {"temperature": 0.8, "seed": 3}
    expected = answer(engine, prompt, 16, N, **options).tokens
    for forgets in (False, True):
        sequence = begin(engine, prompt, 16, N, **options)
        for _ in range(4):
            engine.step([sequence])
        engine.suspend(sequence)
        assert not sequence.slot.busy
        if forgets:
            engine.slots.forget_all()
            answer(engine, text(engine, 60)[20:], 16, 4)
        engine.resume(sequence)
        engine.run([sequence])
        assert sequence.tokens == expected
