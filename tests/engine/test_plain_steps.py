"""Plain steps, several in one call: those made one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tiny_coder
from dflash_local.engine.engine import Engine
from dflash_local.target_model.target import Target
from pair_engine import answer, open_target, request
from plain_answer import PlainAnswer

pytestmark = pytest.mark.usefixtures("as_far_ahead_as_allowed")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target() as opened:
        yield opened


@pytest.mark.one_in(3)
@pytest.mark.parametrize("max_tokens", [2, 15, 16, 17, 18, 40])
def test_steps_made_ahead_are_those_made_one_by_one(target: Target, max_tokens: int) -> None:
    prompt = target.vocabulary.tokenize(tiny_coder.prompts()["code"][1])
    known = PlainAnswer(target, prompt, max_tokens)
    engine = Engine(target, None)
    engine.slots.forget_all()
    steps = []
    sequence = engine.begin(request(prompt, 0, max_tokens))
    while sequence.finish_reason is None:
        before = len(sequence.tokens)
        engine.step([sequence])
        steps.append(len(sequence.tokens) - before)
        assert engine.slots[0].cached == known.text[: len(prompt) + len(sequence.tokens) - 1]
    engine.end(sequence)
    assert sequence.tokens == known.tokens
    assert max(steps) == min(max(max_tokens - 1, 1), 16) or max_tokens < 20
    # What the target has is what `cached` says: it goes on from there.
    longer = [*known.text[:-1], *prompt[:3]]
    assert answer(engine, longer, 0, 8).tokens == PlainAnswer(target, longer, 8).tokens
