"""A real engine whose answers are given: they come out whatever is drafted, at real costs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mini_pair
from dflash_local import InputError, Model
from dflash_local.bench.measure.settings import PLAIN, Variant
from dflash_local.bench.measure.speed import ask
from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.fit.options import LoadOptions
from dflash_local.loading import open_engine as load_engine
from dflash_local.pair import open_pair
from lab.replay.drafts import ReplayedDrafts
from lab.replay.engine import Answers, ReplayEngine
from lab.shapes.writer import write_pair
from mini_shapes import DENSE, HYBRID
from pair_engine import Width, open_engine, request

PROMPT, GIVEN = (
    "def area(width, height):\n",
    '    """Nothing like it."""\n    return width ** height\n' * 2,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine(n_ctx=1024, n_seq=3, n_branches=33) as opened:
        yield opened


def tokens(engine: Engine, text: str) -> list[int]:
    return engine.target.vocabulary.tokenize(text)


def replaying(engine: Engine, prompt: str = PROMPT, given: str = GIVEN) -> ReplayEngine:
    engine.slots.forget_all()
    return ReplayEngine(engine, {tuple(tokens(engine, prompt)): tokens(engine, given)})


@pytest.mark.one_in(8)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("width", "shape"), [(0, "chain"), (8, "chain"), (16, "tree"), (32, "tree")]
)
def test_the_given_text_comes_out(
    engine: Engine, width: Width, shape: DraftShape, temperature: float
) -> None:
    replay, prompt = replaying(engine), tokens(engine, PROMPT)
    wanted = request(prompt, width, 500, shape=shape, temperature=temperature, seed=3)
    answer = replay.begin(wanted)
    replay.run([answer])
    assert answer.tokens == tokens(engine, GIVEN)
    assert answer.finish_reason == "length"
    # What the caches hold is that text, too.
    assert answer.slot.cached == prompt + answer.tokens[:-1]
    assert (answer.stats.drafted > 0) == (width > 0)
    assert answer.stats.emitted == len(answer.tokens)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("width", "shape"), [(0, "chain"), (16, "chain"), (16, "tree")])
def test_a_pairs_own_answer_takes_the_rounds_that_it_took(
    engine: Engine, width: Width, shape: DraftShape
) -> None:
    """So acceptance is real where the drafter is: hidden states and drafts are those of the text,
    also of plain steps, which several are decoded of at once."""
    prompt = tokens(engine, "def fib(n):\n")
    engine.slots.forget_all()
    own = Engine(engine.target, engine.drafter, 3)
    real = own.begin(request(prompt, width, 64, shape=shape))
    own.run([real])
    cached = list(real.slot.cached)
    own.slots.forget_all()
    replay = ReplayEngine(engine, {tuple(prompt): real.tokens})
    again = replay.begin(request(prompt, width, shape=shape, max_tokens=64))
    replay.run([again])
    assert again.tokens == real.tokens
    assert again.stats.outcomes == real.stats.outcomes
    # After the answer, the drafter goes on from the same text.
    assert again.slot.cached == cached


def test_several_at_once_each_get_their_own(engine: Engine) -> None:
    texts = {f"x = {i}\n": f"print({i} + x)\n" * (i + 1) for i in range(3)}
    engine.slots.forget_all()
    answers: Answers = {tuple(tokens(engine, p)): tokens(engine, a) for p, a in texts.items()}
    replay = ReplayEngine(engine, answers)
    for width in (0, 8):
        replay.slots.forget_all()
        running = [replay.begin(request(list(prompt), width, None)) for prompt in answers]
        replay.run(running)
        assert [each.tokens for each in running] == list(answers.values())


def test_a_suspended_answer_goes_on(engine: Engine) -> None:
    replay = replaying(engine)
    answer = replay.begin(request(tokens(engine, PROMPT), 8, None))
    while len(answer.tokens) < 10:
        replay.step([answer])
    replay.suspend(answer)
    replay.slots.forget_all()
    replay.resume(answer)
    replay.run([answer])
    assert answer.tokens == tokens(engine, GIVEN)


def test_a_prompt_without_an_answer_is_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="no answer to this prompt"):
        replaying(engine).begin(request(tokens(engine, "else"), 0))


def test_nothing_is_learnt_for_real_answers(engine: Engine) -> None:
    """`Model.close` keeps what engines that learn have seen."""
    assert engine.learns and not replaying(engine).learns


def opened_model(
    pair: tuple[Path, Path | None], answers: Answers, drafts: ReplayedDrafts | None, **more: Any
) -> Model:
    options = LoadOptions(n_gpu_layers=0, n_threads=1, **more)
    opened, plan = load_engine(open_pair(*pair), options, say=lambda _line: None)
    return Model(ReplayEngine(opened, answers, drafts), plan)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_random_weights_accept_what_was_recorded(tmp_path: Path, shape: DraftShape) -> None:
    """Whole chains of the recorded passages have 5 tokens a round, trees more; and the text that
    comes out is the given one."""
    pair = write_pair(replace(DENSE, n_vocab=9000), "Q8_0", tmp_path, n_layer=3)
    answers: dict[tuple[int, ...], list[int]] = {}
    drafts = ReplayedDrafts(5.0, seed=1)
    given = "".join(f"a line of text, number {i}\n" for i in range(36))
    with opened_model(pair, answers, drafts, n_ctx=2048, draft_shape=shape) as model:
        # Pieces of words, not bytes.
        assert len(model.tokenize(given)) < len(given) / 2
        prompt = model.tokenize(PROMPT)
        answers[tuple(prompt)] = model.tokenize(given)
        lengths = []
        for seed in (0, 0, 1):
            variant = Variant(16, shape, copies=False)
            result = ask(model, prompt, variant, temperature=0.0, seed=seed, max_tokens=240)
            assert result.tokens == model.tokenize(given)[:240]
            lengths.append(result.stats.tokens_per_round)
    assert lengths[0] == lengths[1] != lengths[2]
    mean = sum(lengths[1:]) / 2
    assert (4.2 < mean < 5.8) if shape == "chain" else mean > 5


@pytest.mark.slow
def test_a_recurrent_target_replays(tmp_path: Path) -> None:
    pair = write_pair(HYBRID, "Q8_0", tmp_path, n_layer=5)
    answers: dict[tuple[int, ...], list[int]] = {}
    drafts = ReplayedDrafts(5.0, seed=1)
    with opened_model(pair, answers, drafts, n_ctx=512, draft_width=8) as model:
        answers[tuple(model.tokenize(PROMPT))] = model.tokenize(GIVEN)
        for width in (0, 8):
            result = model.generate(PROMPT, draft_width=width)
            assert result.text == GIVEN
        assert result.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_copies_are_measured_and_can_be_left_out(temperature: float) -> None:
    """The text comes out with copies and without, with a drafter and without."""
    answers: dict[tuple[int, ...], list[int]] = {}
    given = "total += item.price * item.count\n" * 5
    for draft in (mini_pair.pair()[1], None):
        files = mini_pair.pair()[0], draft
        with opened_model(files, answers, None, n_ctx=512, draft_shape="auto") as model:
            prompt = model.tokenize(PROMPT)
            answers[tuple(prompt)] = model.tokenize(given)
            for variant in (Variant(8), Variant(), Variant(8, copies=False), PLAIN):
                if draft is None and variant.width and not variant.copies:
                    continue  # that is plain decoding
                found = ask(model, prompt, variant, temperature=temperature, seed=0, max_tokens=200)
                assert found.tokens == answers[tuple(prompt)]
                if variant.width == 8:
                    assert (found.stats.copied > 0) == variant.copies
