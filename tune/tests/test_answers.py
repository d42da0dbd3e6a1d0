"""Answers to learn from: their tokens, taps and labels are the target's own, and few are kept."""

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
import pytest
import torch

import tiny_coder
from dflash_local.loading import open_drafter
from dflash_local.sampling.params import SamplingParams
from dflash_local.sampling.sampler import Sampler
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from dflash_local_tune.answers import N_LABELS, Answer, Answerer, Ring, drawing, n_looked_at
from dflash_local_tune.training import Trainer
from dflash_local_tune.weights import read_torch_drafter

pytestmark = pytest.mark.slow

N_TOKENS = 24


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    options = TargetOptions(
        n_ctx=512, n_seq=2, kv_type="q8_0", n_threads=1, tapped_layers=(2, 4, 6), n_gpu_layers=0
    )
    with Target(tiny_coder.pair()[0], options) as loaded:
        yield loaded


SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.0, seed=4),
)


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    texts = [text for kind in tiny_coder.prompts().values() for text in kind[:2]]
    return [target.vocabulary.tokenize(text, special=True) for text in texts]


@pytest.fixture(scope="module")
def answers(target: Target, prompts: list[list[int]]) -> list[Answer]:
    drafter = open_drafter(tiny_coder.pair()[1], target, n_seq=2, n_ctx=512)
    answerer = Answerer(target, drafter, 2, N_TOKENS, torch.float32)
    found = list(answerer.answers(zip(prompts, SAMPLINGS, strict=True)))
    answerer.pause()
    return found


def test_taps_and_labels_are_those_of_plain_decoding(
    target: Target, prompts: list[list[int]], answers: list[Answer]
) -> None:
    assert len(answers) >= 3
    for answer in answers:
        sampling = SAMPLINGS[prompts.index(answer.tokens[: answer.n_prompt].tolist())]
        tokens = answer.tokens.tolist()
        n = len(tokens) - 1
        target.clear(0)
        first = answer.n_prompt - 1
        target.decode(tokens[:n], range(n), [0] * n, [row >= first for row in range(n)])
        states = target.hidden_states().reshape(n, -1)
        scale = np.abs(states).mean()
        assert np.abs(answer.features.numpy() - states).mean() < 0.02 * scale
        for i, (ids, found) in enumerate(zip(answer.label_ids, answer.label_probs, strict=True)):
            logits = torch.from_numpy(target.logits(first + i).copy())
            assert set(ids.tolist()) >= set(logits.topk(N_LABELS // 4).indices.tolist())
            logprobs = logits.log_softmax(0).sort(descending=True)
            if sampling.greedy:
                expected = logits[ids].softmax(0)
            else:
                all_of_them = drawing(logprobs.values[None], sampling, target.n_vocab)[0]
                expected = torch.zeros(target.n_vocab).index_add(0, logprobs.indices, all_of_them)
                expected = expected[ids]
            near_a_cut = (found > 0) != (expected > 0)  # of drafted rows the logits differ a little
            assert near_a_cut.sum() <= 2
            torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    target.clear(0)


def test_an_answer_has_its_labels_and_where_the_engine_began_its_rounds(
    answers: list[Answer],
) -> None:
    for answer in answers:
        n = len(answer.tokens) - answer.n_prompt
        assert answer.label_ids.shape == answer.label_probs.shape == (n, N_LABELS)
        assert len(answer.features) == len(answer.tokens) - 1
        rounds = answer.rounds.tolist()
        assert rounds[0] == answer.n_prompt
        assert rounds == sorted(set(rounds))
        assert rounds[-1] < len(answer.tokens) - 1
        assert len(rounds) < N_TOKENS - 1  # some drafts were right


def test_rounds_are_counted_as_the_engine_counts_them(answers: list[Answer]) -> None:
    target, draft = tiny_coder.pair()
    drafter = read_torch_drafter(draft, target, dtype=torch.float32)
    trainer = Trainer(drafter, low_rank=False, n_packed=2)
    for answer in answers[:2]:
        n = len(answer.tokens) - 1 - answer.n_prompt
        rounds = n / trainer.length_on([answer])
        assert rounds == pytest.approx(len(answer.rounds), abs=1)  # a near tie may go either way
    n = sum(len(answer.tokens) - 1 - answer.n_prompt for answer in answers)
    by_engine = n / sum(len(answer.rounds) for answer in answers)
    assert trainer.length_on(answers) == pytest.approx(by_engine, rel=0.05)


ROW = np.log(np.array([0.3, 0.02, 0.2, 0.1, 0.1, 0.14, 0.008, 0.05, 0.05, 0.032], dtype=np.float32))
"""Of a small vocabulary, with ties. No sum of the largest is a `top_p` of the cases: there the last
bit, other on each CPU, would decide what is left."""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "min_p": 0.3},
        {"top_k": 4, "top_p": 0.7},  # 0.7 of what top_k leaves
        {"top_k": 5},
        {"top_k": 4, "top_p": 1.0},  # one of two equal ones is left
        {"top_k": 8, "top_p": 0.93, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.72},
        {"top_k": 10},
        {"top_k": 11, "top_p": 0.9},
        {"top_k": 500, "top_p": 1.0, "min_p": 0.0, "temperature": 2.5},
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
    ],
)
def test_labels_are_the_chances_by_which_the_sampler_draws(settings: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 1} | settings)
    n = len(ROW)
    found = (api.llama_token_data * n)(*((i, float(logit), 0.0) for i, logit in enumerate(ROW)))
    rest = api.llama_token_data_array(data=found, size=n, selected=-1, sorted=False)
    with Sampler(sampling, n, n_ctx=64) as sampler:
        by_chain = not sampling.greedy and not sampling.draws_from_all
        for stage in (*sampler._filters(), *sampler._picks()) if by_chain else ():
            api.llama_sampler_apply(stage, ctypes.byref(rest))
            api.llama_sampler_free(stage)
    kept = sorted((rest.data[i].logit for i in range(rest.size)), reverse=True)
    if sampling.draws_from_all:
        kept = sorted((ROW / sampling.temperature).tolist(), reverse=True)
    expected = torch.zeros(n)
    expected[: len(kept)] = torch.tensor(kept).softmax(0)
    logprobs = torch.from_numpy(ROW).log_softmax(0).sort(descending=True).values[None]
    assert n_looked_at(sampling, n) == n
    torch.testing.assert_close(drawing(logprobs, sampling, n)[0], expected)


@pytest.mark.parametrize(
    ("top_k", "temperature", "expected"),
    [(40, 0.8, 40), (40, 0.0, N_LABELS), (0, 0.8, N_LABELS), (10**9, 0.8, N_LABELS)],
)
def test_as_many_tokens_are_looked_at_as_the_law_takes(
    top_k: int, temperature: float, expected: int
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k)
    assert n_looked_at(sampling, 32000) == expected
    assert n_looked_at(sampling, 12) == 12


def an_answer(n: int) -> Answer:
    empty = torch.zeros(0)
    return Answer(torch.zeros(n, dtype=torch.int64), 1, empty, empty, empty)


def test_a_ring_keeps_the_latest_answers_that_fit() -> None:
    ring = Ring(max_bytes=100 * 8)
    for n in (40, 50, 30, 60):
        ring.add(an_answer(n))
        assert ring.n_bytes <= ring.max_bytes
    assert [len(ring[i].tokens) for i in range(len(ring))] == [30, 60]
    ring.add(an_answer(500))
    assert [len(ring[i].tokens) for i in range(len(ring))] == [500]


def test_a_step_takes_the_new_answers_that_the_ring_still_has_and_some_older_ones() -> None:
    rng = random.Random(0)

    def sizes(ring: Ring, n_new: int, most: int) -> list[int]:
        return [len(each.tokens) for each in ring.batch(n_new, most, rng)]

    ring = Ring(max_bytes=100 * 8)
    for n in range(40, 48):
        ring.add(an_answer(n))
    assert sizes(ring, 8, 16) == [46, 47]  # of the eight new ones
    assert sizes(ring, 2, 1) == [47]
    assert sorted(sizes(ring, 1, 4)) == [46, 47]
    wide = Ring(max_bytes=8000)
    for n in range(10, 20):
        wide.add(an_answer(n))
    found = sizes(wide, 2, 5)
    assert found[:2] == [18, 19] and set(found[2:]) <= set(range(10, 18))
    assert len(set(found)) == 5
