"""Rounds over sequences: slots, the cells that they share, and what happens at the edges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_coder
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from dflash_local.errors import ContextFullError, InputError
from gap_rule import equal_by_gap_rule, joint_noise
from long_text import PYTHON_SOURCE
from pair_engine import consistent, fused_drafter, open_target, request
from plain_answer import PlainAnswer
from shapes import NOISE, exact_target

N = 24


@pytest.fixture(scope="module")
def two_slots(shape: DraftShape, either_file: Path) -> Iterator[Engine]:
    with exact_target(shape, either_file, n_ctx=256, n_seq=2) as target:
        yield Engine(target, fused_drafter(target), n_seq=2)


@pytest.fixture
def engine(two_slots: Engine) -> Iterator[Engine]:
    """Two slots in a context of 256 tokens, all empty."""
    yield two_slots
    for slot in two_slots.slots:
        assert not slot.busy
    two_slots.slots.forget_all()


def begin(
    engine: Engine, prompt: list[int], width: int, max_tokens: int | None = N, **params: Any
) -> Sequence:
    """A request whose drafts have the shape that the engine is for."""
    shape: DraftShape = "tree" if engine.takes_trees else "chain"
    return engine.begin(request(prompt, width, max_tokens, shape=shape, **params))


def answer(
    engine: Engine, prompt: list[int], width: int, max_tokens: int | None = N, **params: Any
) -> Sequence:
    """One such request, run to its end."""
    sequence = begin(engine, prompt, width, max_tokens, **params)
    engine.run([sequence])
    return sequence


def text(engine: Engine, n: int) -> list[int]:
    """The first `n` tokens of a Python file."""
    return engine.target.vocabulary.tokenize(PYTHON_SOURCE[: 8 * n])[:n]


def assert_equal(engine: Engine, expected: list[PlainAnswer], found: list[Sequence]) -> None:
    for slot in engine.slots:
        assert not slot.busy
    engine.slots.forget_all()
    prompts, tokens = [p.prompt for p in expected], [p.tokens for p in expected]
    noise = joint_noise(engine.target, prompts, tokens, [s.request.draft_width for s in found])
    noise = max(noise, NOISE if engine.takes_trees else 0.0)
    for plain, sequence in zip(expected, found, strict=True):
        equal_by_gap_rule(plain.tokens, plain.logprobs, sequence.tokens, noise)


@pytest.mark.slow
def test_a_request_may_join_while_another_runs(engine: Engine) -> None:
    prompts = [engine.target.vocabulary.tokenize(p) for p in tiny_coder.prompts()["code"][:2]]
    expected = [PlainAnswer(engine.target, prompt, N) for prompt in prompts]
    first = begin(engine, prompts[0], 8, N)
    for _ in range(3):
        engine.step([first])
    assert 0 < len(first.tokens) < N
    second = begin(engine, prompts[1], 16, N)
    assert second.slot is not first.slot
    engine.run([first, second])
    for sequence, prompt in ((first, prompts[0]), (second, prompts[1])):
        assert engine.drafter is not None
        consistent(
            engine, engine.drafter, len(prompt) + len(sequence.tokens) - 1, sequence.slot.seq
        )
    assert_equal(engine, expected, [first, second])


@pytest.mark.one_in(2)
def test_one_may_be_cancelled_while_the_other_goes_on(engine: Engine) -> None:
    prompts = [engine.target.vocabulary.tokenize(p) for p in tiny_coder.prompts()["code"][:2]]
    expected = [PlainAnswer(engine.target, prompt, N) for prompt in prompts]
    first, second = (begin(engine, prompt, 5, N) for prompt in prompts)
    for _ in range(3):
        engine.step([first, second])
    first.cancelled.set()
    engine.run([first, second])
    assert first.finish_reason == "cancelled"
    assert len(first.tokens) < N == len(second.tokens)
    expected[0].tokens = expected[0].tokens[: len(first.tokens)]
    assert_equal(engine, expected, [first, second])


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


@pytest.mark.one_in(2)
def test_a_prompt_that_finds_no_room_beside_another(engine: Engine) -> None:
    first = begin(engine, text(engine, 150), 16, N)
    engine.step([first])
    second = begin(engine, text(engine, 200)[50:], 16, N)
    engine.run([first, second])
    assert (second.tokens, second.finish_reason) == ([], "length")
    assert len(first.tokens) == N


@pytest.mark.one_in(2)
def test_a_failing_request_leaves_the_engine_usable(engine: Engine) -> None:
    """Bias forbids every token of the vocabulary: found out with the first row of logits."""
    prompt = text(engine, 40)
    expected = answer(engine, prompt, 16, N).tokens
    nothing = dict.fromkeys(range(engine.target.n_vocab), -float("inf"))
    with pytest.raises(InputError, match="leave no token"):
        answer(engine, prompt, 16, N, logit_bias=nothing)
    assert [slot.busy for slot in engine.slots] == [False, False]
    assert answer(engine, prompt, 16, N).tokens == expected


@pytest.mark.one_in(2)
def test_ending_twice_and_early(engine: Engine) -> None:
    prompt = text(engine, 40)
    expected = answer(engine, prompt, 16, N).tokens
    sequence = begin(engine, prompt, 16, N)
    engine.end(sequence)
    engine.end(sequence)
    assert sequence.finish_reason == "cancelled"
    assert answer(engine, prompt, 16, N).tokens == expected


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": []}, InputError, "the prompt is empty"),
        ({"prompt": [5, -1]}, InputError, "token id -1 of the prompt is not in 0 to 8191"),
        ({"prompt": [8192]}, InputError, "token id 8192 of the prompt is not in 0 to 8191"),
        ({"prompt": [1] * 256}, ContextFullError, "has 256 tokens, the context holds 256"),
        ({"max_tokens": 0}, InputError, "max_tokens is 0; expected a whole number, 1 or more"),
        ({"max_tokens": 2.5}, InputError, "max_tokens is 2.5; expected a whole number"),
        ({"width": -1}, InputError, "draft_width is -1; expected a whole number, 0 or more"),
        ({"width": 65}, InputError, "draft_width is 65; .* allows at most (16|64)"),
    ],
)
def test_what_cannot_begin(
    engine: Engine, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"prompt": [1], "width": 16, "max_tokens": N} | changes
    with pytest.raises(error, match=message) as found:
        begin(engine, given.pop("prompt"), given.pop("width"), **given)
    assert "\n" not in str(found.value)


@pytest.mark.one_in(2)
def test_batches_smaller_than_the_drafts_of_all(
    engine: Engine, shape: DraftShape, either_file: Path
) -> None:
    """Nine rows a batch: two drafts of 16 are cut to what a pass can verify."""
    prompts = [text(engine, 30), text(engine, 50)[20:]]
    expected = [PlainAnswer(engine.target, prompt, N) for prompt in prompts]
    with exact_target(shape, either_file, n_ctx=256, n_seq=2, n_batch=9) as target:
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


@pytest.mark.one_in(2)
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


@pytest.mark.one_in(2)
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


def test_drafts_without_a_drafter(engine: Engine) -> None:
    bare = Engine(engine.target, None)
    with pytest.raises(InputError, match=r"draft_width is 8, but there is no drafter; load one"):
        bare.begin(request([1], 8))
    assert len(answer(bare, [1], 1, 3).tokens) == 3
