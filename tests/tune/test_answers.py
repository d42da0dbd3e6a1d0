"""Answers to learn from: their tokens, taps and labels are the target's own, and few are kept."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dflash_local import demo
from dflash_local.loading import open_drafter
from dflash_local.sampling.params import SamplingParams
from dflash_local.target.options import TargetOptions
from dflash_local.target.target import Target
from dflash_local.tune.answers import N_LABELS, Answer, Answerer, Ring

N_TOKENS = 24


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    options = TargetOptions(
        n_ctx=512, n_seq=2, kv_type="q8_0", n_threads=1, tapped_layers=(2, 4, 6), n_gpu_layers=0
    )
    with Target(demo.pair()[0], options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def answers(target: Target) -> list[Answer]:
    drafter = open_drafter(demo.pair()[1], target, n_seq=2, n_ctx=512)
    texts = [text for kind in demo.prompts().values() for text in kind[:2]]
    prompts = [target.vocabulary.tokenize(text, special=True) for text in texts]
    samplings = [SamplingParams(), SamplingParams(temperature=0.8, seed=3)] * 2
    answerer = Answerer(target, drafter, 2, N_TOKENS, torch.float32)
    found = list(answerer.answers(zip(prompts, samplings, strict=True)))
    answerer.pause()
    assert answerer.n_tokens == sum(len(each.tokens) - each.n_prompt for each in found)
    return found


def test_taps_and_labels_are_those_of_plain_decoding(target: Target, answers: list[Answer]) -> None:
    assert len(answers) >= 3
    for answer in answers:
        tokens = answer.tokens.tolist()
        n = len(tokens) - 1
        target.clear(0)
        first = answer.n_prompt - 1
        target.decode(tokens[:n], range(n), [0] * n, [row >= first for row in range(n)])
        states = target.hidden_states().reshape(n, -1)
        scale = np.abs(states).mean()
        assert np.abs(answer.features.numpy() - states).mean() < 0.02 * scale
        for i, (ids, found) in enumerate(zip(answer.label_ids, answer.label_logprobs, strict=True)):
            logits = torch.from_numpy(target.logits(first + i).copy())
            expected = logits.log_softmax(0)
            torch.testing.assert_close(found, expected[ids], atol=0.1, rtol=0.05)
            assert set(ids.tolist()) >= set(logits.topk(N_LABELS // 4).indices.tolist())
    target.clear(0)


def test_an_answer_has_a_label_for_each_of_its_tokens(answers: list[Answer]) -> None:
    for answer in answers:
        n = len(answer.tokens) - answer.n_prompt
        assert answer.label_ids.shape == answer.label_logprobs.shape == (n, N_LABELS)
        assert len(answer.features) == len(answer.tokens) - 1


def test_an_answer_knows_where_the_engine_began_its_rounds(answers: list[Answer]) -> None:
    for answer in answers:
        rounds = answer.rounds.tolist()
        assert rounds[0] == answer.n_prompt
        assert rounds == sorted(set(rounds))
        assert rounds[-1] < len(answer.tokens) - 1
        assert len(rounds) < N_TOKENS - 1  # some drafts were right


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
