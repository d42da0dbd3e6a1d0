"""The state of a run: faults of writing or reading are told in one line."""

from pathlib import Path

import pytest
import torch

from dflash_local.errors import InputError
from dflash_local.tune.state import read_state, state_told, write_state


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = tmp_path / "state.pt"
    write_state({"low_rank": True, "trained": {"fc": torch.ones(3)}}, place)
    found = read_state(place)
    assert found["low_rank"] is True
    torch.testing.assert_close(found["trained"]["fc"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_a_state_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written") as found:
        write_state({"step": 1}, tmp_path / "none" / "state.pt")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("content", [b"", b"no state", b"PK\3\4 cut off", None])
def test_a_state_that_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, content: bytes | None
) -> None:
    """As a full disk or another version leaves it."""
    place = tmp_path / "state.pt"
    if content is None:
        write_state({"step": 1}, place)
    else:
        place.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as the state") as found:
        read_state(place)
    assert "\n" not in str(found.value)
    assert str(tmp_path) in str(found.value)


def test_a_state_of_another_drafter_is_told_in_one_line(tmp_path: Path) -> None:
    place, told = tmp_path / "state.pt", "cannot be read as the state"
    with pytest.raises(InputError, match=told), state_told(place):
        torch.ones(2).copy_(torch.ones(3))
