"""Prompts: read in chunks beside answers, as far as there is room."""

from itertools import pairwise

from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from gap_rule import joint_noise
from pair_engine import fused_drafter
from plain_answer import PlainAnswer
from shapes import NOISE, exact_target
from two_slots import N, begin, text


def test_a_long_prompt_is_read_in_chunks_while_another_answers(shape: DraftShape) -> None:
    with exact_target(shape, n_ctx=256, n_seq=2, n_batch=32) as target:
        engine = Engine(target, fused_drafter(target), n_seq=2)
        prompts = [text(engine, 20), text(engine, 160)[40:]]
        plain = [PlainAnswer(target, prompt, N) for prompt in prompts]
        first = begin(engine, prompts[0], 4)
        engine.step([first])
        second = begin(engine, prompts[1], 4)
        read, written = [0], [len(first.tokens)]
        while second.in_prompt:
            engine.step([first, second])
            read.append(len(second.slot.cached))
            written.append(len(first.tokens))
        assert len(read) > 4 and all(b - a <= 32 for a, b in pairwise(read))
        assert all(a < b or b == N for a, b in pairwise(written))
        engine.run([first, second])
        engine.slots.forget_all()
        tokens = [each.tokens for each in plain]
        for each, found in zip(plain, (first, second), strict=True):
            assert len(found.tokens) == len(each.tokens)
            each.equals(
                found.tokens, lambda: max(NOISE, joint_noise(target, prompts, tokens, [4, 4]))
            )
        assert second.stats.prompt_tokens == 120 and second.stats.ttft_s > 0


def test_a_prompt_that_finds_no_room_beside_another(engine: Engine) -> None:
    first = begin(engine, text(engine, 150), 16, N)
    engine.step([first])
    second = begin(engine, text(engine, 200)[50:], 16, N)
    engine.run([first, second])
    assert (second.tokens, second.finish_reason) == ([], "length")
    assert len(first.tokens) == N
