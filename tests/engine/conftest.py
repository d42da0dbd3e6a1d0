"""Fixtures that the tests of the engine share."""

from __future__ import annotations

import pytest

from dflash_local.engine import plain_steps


@pytest.fixture
def as_far_ahead_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a step takes here, plain steps are made several at a time."""
    monkeypatch.setattr(plain_steps, "_AHEAD_S", 1e9)
