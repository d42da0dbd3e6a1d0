"""Answers drawn from candidates that a device has found, by the graph of a GPU run on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_files
import tiny_coder
from dflash_local.engine.engine import Engine
from pair_engine import answer, fused_drafter, open_target, request
from sampling_ways import WAYS

SAMPLED: dict[str, dict[str, Any]] = {
    "by default": {"temperature": 0.8, "seed": 5},
    "hot": {"temperature": 2.0, "seed": 6, "top_k": 3, "min_p": 0.0},
    "by min-p": {"temperature": 0.8, "seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
    "by top-p": {"temperature": 0.8, "seed": 5, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
    "temperature alone": {"temperature": 1.0, "seed": 8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "with log-probabilities": {"temperature": 0.8, "seed": 5, "logprobs": 4},
    **WAYS,
}
PROMPT = [40 + i for i in range(30)]


@pytest.mark.one_in(16)
@pytest.mark.parametrize("way", SAMPLED)
def test_answers_are_those_from_whole_rows(way: str) -> None:
    with open_target() as target:
        engine = Engine(target, fused_drafter(target), n_seq=1)
        expected = answer(engine, PROMPT, 0, **SAMPLED[way])
        target.native.search_on_cpu = True
        for width in (0, 8):
            found = answer(engine, PROMPT, width, **SAMPLED[way])
            assert found.tokens == expected.tokens
            assert [p.token for p in found.logprobs] == [p.token for p in expected.logprobs]
            for entry, known in zip(found.logprobs, expected.logprobs, strict=True):
                assert entry.logprob == pytest.approx(known.logprob, abs=1e-3)
                assert [i for i, _ in entry.top] == [i for i, _ in known.top]


def test_an_exact_answer_has_its_own_sums() -> None:
    """A neighbour that asks for many candidates has the rows searched in shorter chunks."""
    many = {"temperature": 0.8, "seed": 1, "top_k": 120, "logprobs": 1}
    with open_target(n_ctx=2 * 512, n_seq=2, exact=True) as target:
        target.native.search_on_cpu = True
        engine, found = Engine(target, None, n_seq=2, exact=True), []
        for beside in (None, many):
            engine.slots.forget_all()
            way = SAMPLED["with log-probabilities"]
            running = [engine.begin(request(PROMPT, 0, 32, **way))]
            if beside:
                running.insert(0, engine.begin(request(PROMPT[1:], 0, 40, **beside)))
            engine.run(running)
            found.append(running[-1].logprobs)
        assert found[0] == found[1]


def test_log_probabilities_change_no_token_among_equal_ones(tmp_path: Path) -> None:
    """Of equal ones a graph finds any."""

    def in_pairs(tensors: dict[str, gguf_files.Tensor]) -> None:
        data, kind = tensors["token_embd.weight"]
        tensors["token_embd.weight"] = np.repeat(data[::2], 2, axis=0), kind

    path = gguf_files.changed(tiny_coder.pair()[0], tmp_path / "pairs.gguf", tensors=in_pairs)
    with open_target(path) as target:
        found = []
        for search_on_cpu in (False, True):
            target.native.search_on_cpu = search_on_cpu
            for logprobs in (None, 0, 3):
                engine = Engine(target, None)
                found.append(answer(engine, PROMPT, 0, 1, logprobs=logprobs))
                engine.slots.forget_all()
        assert len({sequence.tokens[0] for sequence in found}) == 1
        (token,) = found[0].tokens
        for sequence in found[1:3]:
            (entry,) = sequence.logprobs
            assert entry.token == token
        assert [i for i, _ in found[2].logprobs[0].top[:2]] == [token, token + 1]
