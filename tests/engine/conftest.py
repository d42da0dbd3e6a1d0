"""Fixtures that the tests of the engine share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import mini_pair
from dflash_local import Model
from dflash_local.engine import plain_steps
from shapes import exact_model
from two_slots import engine, two_slots

__all__ = ["engine", "two_slots"]  # fixtures that have a file of their own


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    """Target and drafter of the mini pair."""
    return mini_pair.pair()


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The mini pair, its drafts chains."""
    with exact_model("chain", n_ctx=2048) as loaded:
        yield loaded


@pytest.fixture
def as_far_ahead_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a step takes here, plain steps are made several at a time."""
    monkeypatch.setattr(plain_steps, "_AHEAD_S", 1e9)
