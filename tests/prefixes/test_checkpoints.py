"""At which lengths a slot keeps checkpoints, and which ones go when there is no room for all."""

import numpy as np
import pytest

from dflash_local.prefixes.checkpoints import BOUNDARY, Checkpoints
from dflash_local.target_model.target import StateCheckpoint

STATE = 1000


def read(kept: Checkpoints, n_prompt: int, begin: int = 0) -> list[int]:
    """Read a prompt on from its first `begin` tokens, and keep what is wanted."""
    added: list[int] = []
    while (length := kept.wanted(added[-1] if added else begin, n_prompt)) is not None:
        if length < begin:
            break
        kept.keep(StateCheckpoint(length, np.zeros(STATE, np.uint8)))
        added.append(length)
    return added


def lengths(kept: Checkpoints) -> list[int]:
    return [checkpoint.length for checkpoint in kept.all]


def test_without_room_only_the_ends_of_the_last_two_prompts() -> None:
    kept = Checkpoints()
    for n_prompt in (100, 5000, 9000):
        assert read(kept, n_prompt) == [n_prompt - 32]
    assert lengths(kept) == [4968, 8968]
    assert read(kept, 9010) == []


def test_boundaries_of_a_long_prompt_and_of_the_turns_after_it() -> None:
    kept = Checkpoints(20 * STATE)
    assert read(kept, 2 * BOUNDARY + 500) == [BOUNDARY, 2 * BOUNDARY, 2 * BOUNDARY + 468]
    # The end of this one is as good as the boundary just before it.
    assert read(kept, 3 * BOUNDARY + 90, 2 * BOUNDARY + 499) == [3 * BOUNDARY + 58]
    assert read(kept, 4 * BOUNDARY + 190, 3 * BOUNDARY + 90) == [4 * BOUNDARY, 4 * BOUNDARY + 158]
    kept.cut(2 * BOUNDARY)
    assert lengths(kept) == [BOUNDARY, 2 * BOUNDARY]
    assert kept.longest(2 * BOUNDARY - 1) is kept.all[0]
    assert kept.longest(BOUNDARY - 1) is None


@pytest.mark.parametrize("n_fitting", [1, 2, 4, 7])
def test_as_many_as_there_is_room_for_all_along_a_text(n_fitting: int) -> None:
    kept = Checkpoints(n_fitting * STATE + STATE // 2)
    for n in (1, 2, 5, 16, 33):
        read(kept, n * BOUNDARY + 100, max(lengths(kept), default=0))
        found = [c.length // BOUNDARY for c in kept.at_boundaries]
        assert len(found) == min(n_fitting, n)
        gaps = np.diff([0, *found])
        assert max(gaps) <= max(2 * n / n_fitting, 1)
        assert found == sorted(found)


def test_a_state_that_does_not_fit_is_kept_at_ends_only() -> None:
    kept = Checkpoints(STATE - 1)
    first = read(kept, 3 * BOUNDARY + 200)
    assert first == [BOUNDARY, 3 * BOUNDARY + 168]  # its size was not known before
    assert read(kept, 6 * BOUNDARY + 200, 3 * BOUNDARY) == [6 * BOUNDARY + 168]


def test_exact_answers_go_on_at_whole_batches() -> None:
    kept = Checkpoints(20 * STATE, least=500)
    assert read(kept, 6000) == [2500, 5000, 5500]


def test_those_of_another_slot() -> None:
    of, kept = Checkpoints(20 * STATE), Checkpoints(2 * STATE)
    read(of, 5 * BOUNDARY + 300)
    read(kept, 700)
    kept.take(c for c in of.all if c.length <= 4 * BOUNDARY)
    assert lengths(kept) == [2 * BOUNDARY, 4 * BOUNDARY]
