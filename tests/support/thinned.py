"""Some cases of many for the daily run; the others are slow tests, which CI runs as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """Parameters of a test, or of a fixture: the first of each `every` stays in the daily run."""
    return [case if i % every == 0 else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
