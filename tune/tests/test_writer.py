"""A writer writes the target's answers, with the labels and features of each token."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import tiny_coder
from dflash_local.loading import load
from dflash_local.target_model.target import Target
from dflash_local_tune.writer import Asked, Text, Writer

TAPS = (2, 4)
N = 12


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target.load(
        tiny_coder.pair()[0], n_ctx=512, n_seq=2, n_threads=1, tapped_layers=TAPS
    ) as found:
        yield found


def writer_of(target: Target, n_seq: int = 3) -> tuple[Writer, list[Text]]:
    prompts: list[Text] = []
    return Writer(target, n_seq, 128, N, torch.float32, "cpu", prompts.append), prompts


def test_texts_and_hidden_states_are_the_targets_own(target: Target) -> None:
    texts = [*tiny_coder.prompts()["code"][:4], "a"]
    asked = [Asked(target.vocabulary.tokenize(text)[-100:], 0.0, N) for text in texts]
    assert {len(each.prompt) > 3 for each in asked} == {True, False}  # both ways to begin
    writer, _ = writer_of(target)
    answers = list(writer.answers(iter(asked)))
    writer.close()
    found = {tuple(each.tokens[: each.n_prompt].tolist()): each for each in answers}
    assert len(found) >= 3
    with load(tiny_coder.pair()[0], n_ctx=256, n_gpu_layers=0, n_threads=1, quiet=True) as model:
        for prompt, answer in found.items():
            plain = model.generate(list(prompt), max_tokens=N, temperature=0).tokens
            written = answer.tokens[answer.n_prompt :].tolist()
            assert written[: len(plain)] == plain
            assert answer.label_ids[:, 0].tolist() == written
            assert torch.allclose(answer.label_probs.sum(dim=-1), torch.ones(len(written)))
    answer = answers[0]
    tokens = answer.tokens[:-1].tolist()
    target.decode(tokens, range(len(tokens)), [0] * len(tokens), [False] * len(tokens))
    target.clear(0)
    states = target.stored(target.feature_rows)
    assert np.allclose(answer.features.numpy(), states, rtol=1e-3, atol=1e-2 * np.abs(states).max())


def test_prompts_go_elsewhere_and_at_a_temperature_texts_differ(target: Target) -> None:
    writer, prompts = writer_of(target)
    prompt = target.vocabulary.tokenize("def ")
    asked = [Asked(prompt, 1.0, N, is_prompt=i % 2 == 0) for i in range(8)]
    answers = list(writer.answers(iter(asked)))
    writer.close()
    assert len(prompts) == 4
    texts = {tuple(each.tokens) for each in prompts} | {tuple(a.tokens.tolist()) for a in answers}
    assert len(texts) > 4
    assert all(text.n_written <= N for text in prompts)


def test_an_answer_from_elsewhere_is_read_as_it_is(target: Target) -> None:
    writer, _ = writer_of(target)
    prompt, answer = target.vocabulary.tokenize("def "), list(range(40, 55))
    (found,) = writer.answers(iter([Asked(prompt, answer=answer)]))
    writer.close()
    assert found.tokens.tolist() == prompt + answer
    assert found.label_ids[:, 0].tolist() == answer
    assert found.label_probs[:, 0].tolist() == [1.0] * len(answer)
    assert len(found.features) == len(prompt) + len(answer) - 1
