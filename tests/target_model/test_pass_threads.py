"""The number of threads may change between any two passes: it changes no bit of a result, but those
of single rows after 256 tokens of an f16 cache, where nobody asked for exact ones."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny_coder
from dflash_local.engine.engine import Engine
from dflash_local.target_model.bare_pass import prefill, rows_of
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from lab.shapes.shape import PairShape
from lab.shapes.writer import write_pair
from mini_shapes import DENSE, EXPERTS, GPT_OSS, HYBRID, SHORT_CONV
from pair_engine import answer, fused_drafter, open_target

Parts = tuple[tuple[int, int], ...]
SPLIT = (300, 1)
"""A pass of one row beyond 256 tokens of an f16 cache: ggml may split it among its threads."""
PARTS: Parts = ((20, 1), (20, 3), (215, 1), (215, 17), SPLIT, (300, 2))
"""Tokens before some rows, and how many of these are decoded at once."""


class Turns:
    """Another number of threads for each pass that is short."""

    def __init__(self, n_most: int) -> None:
        self._numbers = cycle([1, n_most, 1, 1, n_most])
        self.asked = 0

    def n_threads(self) -> int:
        self.asked += 1
        return next(self._numbers)


class Fewer:
    def n_threads(self) -> int:
        return 1


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is one, or sixteen."""
    monkeypatch.setattr("dflash_local.target_model.target.default_threads", lambda: 2)


def logits(target: Target, parts: Parts) -> list[NDArray[np.float32]]:
    """Those of rows at several depths and widths."""
    random, found = np.random.default_rng(1), []
    for depth, width in parts:
        tokens = [int(token) for token in random.integers(5, target.n_vocab, depth + 17)]
        target.clear(0)
        last = prefill(target, tokens[:depth])
        found.append(target.logits(last).copy())
        found += rows_of(target, depth, tokens[depth:], width)
    return found


def same_in_turns(target: Target, parts: Parts = PARTS) -> None:
    """Fail where a bit depends on the threads."""
    target._pass_threads.cores = None
    expected = logits(target, parts)
    target._pass_threads.cores = turns = Turns(2)  # type: ignore[assignment]
    found = logits(target, parts)
    assert turns.asked > len(parts)
    assert all(np.array_equal(*rows) for rows in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_type", "flash_attn", "exact"),
    [
        ("f16", True, True),
        ("f16", True, False),
        ("f16", False, False),
        ("q8_0", True, False),
        ("bf16", True, False),
    ],
)
def test_logits_are_the_same(kv_type: str, flash_attn: bool, exact: bool) -> None:
    """Also of a row that ggml splits, where exact ones are asked for."""
    how = {"kv_type": kv_type, "flash_attn": flash_attn, "exact": exact, "n_ctx": 768}
    splits = kv_type == "f16" and flash_attn and not exact
    with open_target(tiny_coder.pair()[0], n_threads=None, tapped_layers=(), **how) as target:  # type: ignore[arg-type]
        same_in_turns(target, tuple(p for p in PARTS if not (splits and p == SPLIT)))


@pytest.mark.parametrize(("exact", "expected"), [(False, 1), (True, 2)])
def test_a_row_that_ggml_splits_has_all_threads_for_exact_answers(
    exact: bool, expected: int
) -> None:
    how = {"kv_type": "f16", "n_ctx": 768, "tapped_layers": (), "exact": exact}
    with open_target(tiny_coder.pair()[0], n_threads=None, **how) as target:  # type: ignore[arg-type]
        target._pass_threads.cores = Fewer()  # type: ignore[assignment]
        prefill(target, [7] * 299)
        rows_of(target, 299, [7], 1)
        assert target._pass_threads.computing == (expected, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [DENSE, EXPERTS, GPT_OSS, HYBRID, SHORT_CONV], ids=lambda s: s.name
)
def test_those_of_other_architectures_are(shape: PairShape, tmp_path: Path) -> None:
    quant = "Q8_0" if shape is GPT_OSS else "Q4_K_M"
    path, _ = write_pair(shape, quant, tmp_path)
    for kv_type in ("f16", "q8_0"):
        with Target(path, TargetOptions(n_ctx=768, kv_type=kv_type, exact=True)) as target:
            same_in_turns(target)


@pytest.fixture(params=["q8_0", "f16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_target(
        kv_type=request.param, n_threads=None, n_ctx=768, exact=request.param == "f16"
    ) as target:
        yield Engine(target, fused_drafter(target), n_seq=1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("width", "logprobs"), [(0, None), (0, 1), (5, 1)])
def test_an_answer_across_256_tokens_is_the_same(
    engine: Engine, width: int, logprobs: int | None
) -> None:
    target = engine.target
    prompt = target.vocabulary.tokenize(tiny_coder.prompts()["code"][0] * 9)[:230]
    answers = []
    for cores in (None, Turns(2)):
        target._pass_threads.cores = cores  # type: ignore[assignment]
        engine.forget()
        answers.append(answer(engine, prompt, width, max_tokens=60, logprobs=logprobs))
    assert len(answers[0].tokens) == 60
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs == answers[1].logprobs


def test_a_number_that_was_asked_for_stays() -> None:
    with open_target(tiny_coder.pair()[0], n_threads=2, tapped_layers=()) as target:
        assert target._pass_threads.cores is None
        assert target.n_threads == 2


def test_short_passes_alone_are_computed_by_fewer() -> None:
    with open_target(tiny_coder.pair()[0], n_threads=None, tapped_layers=()) as target:
        target._pass_threads.cores = Fewer()  # type: ignore[assignment]
        for n_rows, expected in ((1, 1), (16, 1), (400, 2), (1, 1)):
            target.clear(0)
            prefill(target, [7] * n_rows)
            assert target._pass_threads.computing[1] == expected
