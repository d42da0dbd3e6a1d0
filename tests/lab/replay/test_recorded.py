"""The recorded drafts: their contents, and passages drawn so that rounds have a length."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_local.errors import InputError
from lab.replay.recorded import RecordedDrafts


def test_its_confidence_is_what_it_is_worth() -> None:
    known = RecordedDrafts.shipped()
    said = np.exp(known.logprobs[:, :, 0, 0])
    assert (known.ranks[:, :, 0] == 0).mean() == pytest.approx(said.mean(), abs=0.1)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    known = RecordedDrafts.shipped()
    known.write(tmp_path / "again.npz")
    again = RecordedDrafts.read(tmp_path / "again.npz")
    assert (again.ranks == known.ranks).all()
    assert np.abs(np.exp(again.logprobs) - np.exp(known.logprobs)).max() < 0.01


@given(st.floats(2.5, 8.0))
def test_passages_are_drawn_so_that_chains_have_the_length(length: float) -> None:
    known = RecordedDrafts.shipped()
    assert 1 + sum(known.rates(length, 15)) == pytest.approx(length, abs=1e-6)
    assert known.weights(length).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("length", [0.99, 16.01, 0.0, -3.0, float("nan"), float("inf")])
def test_a_length_that_no_passage_has_is_refused(length: float) -> None:
    with pytest.raises(InputError, match=r"expected 1\.\d\d to \d+\.\d\d"):
        RecordedDrafts.shipped().weights(length)
