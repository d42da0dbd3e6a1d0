"""Some cases of many for the daily run; the others are slow tests, which CI runs as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """Parameters of a test, or of a fixture: the first of each `every` stays in the daily run."""
    return [
        case
        if i % every == 0
        else pytest.param(*case, marks=pytest.mark.slow)
        if isinstance(case, tuple)
        else pytest.param(case, marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
