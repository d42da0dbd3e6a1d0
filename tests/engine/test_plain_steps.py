"""Plain steps, several in one call: their text is that of steps one by one, however it ends."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_coder
from dflash_local import load
from dflash_local.engine.engine import Engine
from dflash_local.errors import BackendError
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from dflash_local.target_model.target import Target
from given_rows import GivenRows
from pair_engine import answer, open_target, request
from plain_answer import PlainAnswer
from recurrent import write_mamba
from sampling_ways import WAYS

pytestmark = pytest.mark.usefixtures("as_far_ahead_as_allowed")
N = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "by default": {"temperature": 0.8, "seed": 5},
    "temperature alone": {"temperature": 1.0, "seed": 8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "by top-p": {"temperature": 0.8, "seed": 9, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
    "penalties below 1": {"temperature": 0.7, "seed": 2, "repeat_penalty": 0.9},
    "greedy with penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    **{name: way for name, way in WAYS.items() if "grammar" not in name},
}
PROMPTS = [[40 + 7 * i + j for j in range(20 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target(n_seq=4) as opened:
        yield opened


@pytest.fixture
def n_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps that were made in one call."""
    made: list[int] = []
    decode_ahead = target.decode_ahead

    def counted(*given: Any) -> list[list[int]]:
        steps = decode_ahead(*given)
        made.append(len(steps))
        return steps

    monkeypatch.setattr(target, "decode_ahead", counted)
    return made


def by_hand(target: Target, prompt: list[int], n: int, settings: dict[str, Any]) -> list[int]:
    """Each token drawn from a whole row, one pass after the other."""
    target.clear(0)
    tokens: list[int] = []
    params, vocabulary = SamplingParams(**settings), target.vocabulary
    with Sampler(params, target.n_vocab, n_ctx=target.n_ctx, vocabulary=vocabulary) as sampler:
        sampler.accept_prompt(prompt)
        rows, begin = prompt, 0
        while len(tokens) < n:
            end = begin + len(rows)
            output = [False] * (len(rows) - 1) + [True]
            target.decode(rows, range(begin, end), [0] * len(rows), output)
            tokens.append(sampler.sample(target.logits(len(rows) - 1)))
            if vocabulary.ends_text(tokens[-1]):
                break
            rows, begin = tokens[-1:], end
    target.clear(0)
    return tokens


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_ahead_draw_what_whole_rows_draw(
    target: Target, n_steps: list[int], name: str
) -> None:
    expected = by_hand(target, PROMPTS[0], 48, SETTINGS[name])
    engine = Engine(target, None, n_seq=4)
    for on_device in (False, True):
        engine.slots.forget_all()
        target.native.search_on_cpu = on_device
        assert answer(engine, PROMPTS[0], 0, **SETTINGS[name]).tokens == expected
        assert max(n_steps) > 1
    target.native.search_on_cpu = False
    engine.slots.forget_all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("max_tokens", [2, 15, 16, 17, 18, 40])
def test_steps_made_ahead_are_those_made_one_by_one(target: Target, max_tokens: int) -> None:
    prompt = target.vocabulary.tokenize(tiny_coder.prompts()["code"][1])
    known = PlainAnswer(target, prompt, max_tokens)
    engine = Engine(target, None, n_seq=4)
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


def test_sequences_with_settings_of_their_own_go_ahead_together(
    target: Target, n_steps: list[int]
) -> None:
    """One of them ends by itself, in the middle of such steps; its slot then serves again."""
    names = ["by default", "greedy", "seeded with penalties", "temperature alone"]
    pairs = list(zip(PROMPTS, (SETTINGS[name] for name in names), strict=True))
    expected = [by_hand(target, prompt, 32, settings) for prompt, settings in pairs]
    engine = Engine(target, None, n_seq=4)
    for stopped in (1, 2):
        requests = [request(prompt, 0, 32, **settings) for prompt, settings in pairs]
        seen: list[int] = []

        def stop_at_21(token: int, seen: list[int] = seen) -> bool:
            seen.append(token)
            return len(seen) == 21

        requests[stopped] = replace(requests[stopped], on_token=stop_at_21)
        n_steps.clear()
        sequences = [engine.begin(each) for each in requests]
        engine.run(sequences)
        assert max(n_steps) > 1
        for i, sequence in enumerate(sequences):
            assert sequence.tokens == (expected[i][:21] if i == stopped else expected[i])
            assert sequence.stats.sample_s > 0
            cached = [*PROMPTS[i], *sequence.tokens[:-1]]
            assert engine.slots[sequence.slot.seq].cached == cached
        prompt, settings = PROMPTS[stopped] + expected[stopped][:21], pairs[stopped][1]
        again = answer(engine, prompt, 0, 20, **settings)
        assert again.stats.cached_tokens == len(prompt) - 1
        engine.slots.forget_all()
        assert again.tokens == answer(engine, prompt, 0, 20, **settings).tokens
        engine.slots.forget_all()


def test_a_grammar_beside_others_holds_them_to_one_step(target: Target, n_steps: list[int]) -> None:
    """Each of its tokens is asked about. The others' text stays the same."""
    bound, free = WAYS["seeded JSON grammar"], SETTINGS["by default"]
    engine = Engine(target, None, n_seq=4)
    alone = answer(engine, PROMPTS[1], 0, 24, **bound).tokens
    logprobs = answer(engine, PROMPTS[2], 0, 24, **free, logprobs=3)
    expected = by_hand(target, PROMPTS[0], 24, free)
    engine.slots.forget_all()
    n_steps.clear()
    wanted = [(PROMPTS[0], free), (PROMPTS[1], bound), (PROMPTS[2], {**free, "logprobs": 3})]
    sequences = [engine.begin(request(prompt, 0, 24, **way)) for prompt, way in wanted]
    engine.run(sequences)
    assert [s.tokens for s in sequences] == [expected, alone, logprobs.tokens]
    assert [p.token for p in sequences[2].logprobs] == logprobs.tokens
    assert set(n_steps[: len(alone) - 1]) == {1}
    engine.slots.forget_all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_numbers_at_a_later_step_end_that_answer_alone(
    tmp_path: Path, temperature: float
) -> None:
    """Of two sequences that go 0, 1, 2, ... and 8, 9, 8, ..., the first has none after 4."""
    with closing(GivenRows(tmp_path, 512, n_seq=2)) as given:
        rows = np.zeros((10, 512), np.float32)
        rows[range(10), [1, 2, 3, 4, 5, 6, 7, 8, 9, 8]] = 50
        rows[4, 77] = np.inf
        given.give(rows)
        engine = Engine(given.target, None, n_seq=2)
        settings = {"temperature": temperature, "seed": 1}
        first, second = (engine.begin(request([i], 0, 20, **settings)) for i in (0, 8))
        with pytest.raises(BackendError, match="not finite"):
            engine.run([first, second])
        assert first.tokens == [1, 2, 3, 4]
        assert not engine.slots[first.slot.seq].cached
        assert second.tokens == [9, 8] * 10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_stop_string_among_several_steps_leaves_a_recurrent_target_usable(
    tmp_path: Path, temperature: float
) -> None:
    """Its state cannot forget the steps after the stop string, so the slot has to know of them."""
    path = write_mamba(tmp_path / "mamba.gguf", tiny_coder.pair()[0])
    options = {"n_ctx": 512, "n_seq": 1, "n_threads": 1}
    prompt = "def read"
    sampling = {"temperature": temperature, "seed": 4}
    with load(path, None, **options) as model:
        whole = model.generate(prompt, max_tokens=N, **sampling)
        stopped_at = []
        for n in range(1, N - 4):
            before, stop = model.detokenize(whole.tokens[:n]), model.detokenize([whole.tokens[n]])
            if not stop or stop in before or "\ufffd" in stop:
                continue
            model.forget()
            stopped = model.generate(prompt, max_tokens=N, stop=stop, **sampling)
            assert (stopped.finish_reason, stopped.text) == ("stop", before)
            stopped_at.append(n)
            following = prompt + before + " again"
            second = model.generate(following, max_tokens=N, **sampling).text
            model.forget()
            assert second == model.generate(following, max_tokens=N, **sampling).text
        assert stopped_at
