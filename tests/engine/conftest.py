"""Fixtures that the tests of the engine share."""

from __future__ import annotations

import pytest

from dflash_local.engine import plain_steps
from two_slots import engine, two_slots

__all__ = ["engine", "two_slots"]  # fixtures that have a file of their own


@pytest.fixture
def as_far_ahead_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a step takes here, plain steps are made several at a time."""
    monkeypatch.setattr(plain_steps, "_AHEAD_S", 1e9)
