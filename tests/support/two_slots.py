"""Two slots of the mini pair in a context of 256 tokens, for chains or for trees."""

from collections.abc import Iterator
from typing import Any

import pytest

from dflash_local.draft.shape import DraftShape
from dflash_local.engine.engine import Engine
from dflash_local.engine.sequence import Sequence
from long_text import PYTHON_SOURCE
from pair_engine import fused_drafter, request
from shapes import exact_target

N = 24


@pytest.fixture(scope="module")
def two_slots(shape: DraftShape) -> Iterator[Engine]:
    with exact_target(shape, n_ctx=256, n_seq=2) as target:
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
