"""A pair on trial, on machines that other work slows down."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from dflash_local import Model, Stats
from dflash_local.doctor import trial


def test_a_machine_that_gets_slower_or_faster_is_no_gain(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting gains nothing here: each answer takes as long as it comes late."""
    answer, clock = trial._answer, count(10)

    def slower(*arguments: Any, **options: Any) -> Stats:
        stats = answer(*arguments, **options)
        return replace(stats, decode_s=next(clock) * stats.emitted)

    monkeypatch.setattr(trial, "_answer", slower)
    monkeypatch.setattr(trial, "N_TOKENS", 8)
    found = trial.try_pair(model)
    assert found.gains == pytest.approx([1.0] * 3)
    assert found.gain == pytest.approx(1.0)
