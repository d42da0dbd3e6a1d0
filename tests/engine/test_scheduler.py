"""Properties of the policy, without a model: who begins, who waits, whose prompt goes on."""

import random

import pytest

from dflash_local.engine.scheduler import (
    LEAST_ROWS,
    LIKELY_ANSWER,
    Waiting,
    ahead,
    cells_for,
    chunk_rows,
    n_to_begin,
    retry_after,
    share_rows,
)

N_CTX = 4096


def test_cells_are_promised_for_the_prompt_and_a_likely_answer() -> None:
    assert cells_for(100, 0, 20, N_CTX) == 120
    assert cells_for(100, 0, None, N_CTX) == cells_for(100, 0, 10**6, N_CTX) == 100 + LIKELY_ANSWER
    assert cells_for(N_CTX - 1, 0, None, N_CTX) == N_CTX
    # An answer that has outgrown its promise is promised more than it has.
    assert all(cells_for(100, n, None, N_CTX) > 100 + n for n in range(0, 3000, 37))
    assert all(cells_for(100, n, 3000, N_CTX) <= 3100 for n in range(0, 3000, 37))


def test_they_begin_in_the_order_in_which_they_came() -> None:
    small, large = Waiting(100), Waiting(1000)
    assert n_to_begin([small] * 5, n_running=1, n_slots=4, free_cells=N_CTX) == 3
    assert n_to_begin([small] * 5, n_running=4, n_slots=4, free_cells=N_CTX) == 0
    assert n_to_begin([small, large, small], n_running=1, n_slots=4, free_cells=900) == 1
    assert n_to_begin([large, small], n_running=1, n_slots=4, free_cells=900) == 0
    assert n_to_begin([], n_running=0, n_slots=4, free_cells=N_CTX) == 0


def test_the_queue_never_stands_still() -> None:
    lot = random.Random(0)
    for _ in range(500):
        waiting = [
            Waiting(lot.randint(1, N_CTX), exclusive=lot.random() < 0.2)
            for _ in range(lot.randint(1, 6))
        ]
        n = n_to_begin(waiting, n_running=0, n_slots=3, free_cells=N_CTX)
        assert 1 <= n <= 3
        assert n == 1 or sum(w.cells for w in waiting[:n]) <= N_CTX


def test_an_exclusive_request_has_the_engine_for_itself() -> None:
    exclusive, other = Waiting(exclusive=True), Waiting(10)
    assert n_to_begin([exclusive, other], n_running=1, n_slots=4, free_cells=N_CTX) == 0
    assert n_to_begin([exclusive, other], n_running=0, n_slots=4, free_cells=N_CTX) == 1
    # Those before it begin, those behind it wait with it.
    assert n_to_begin([other, exclusive, other], n_running=0, n_slots=4, free_cells=N_CTX) == 1


def test_waiting_ends_at_its_time() -> None:
    assert [Waiting(until=4.0).is_overdue(now) for now in (3.9, 4.0, 9.0)] == [False, True, True]
    assert not Waiting().is_overdue(9.0)


def test_those_turned_away_come_back_when_a_slot_is_likely_free() -> None:
    assert retry_after([], 4) == 1
    assert retry_after([0.01] * 9, 4) == 1
    assert retry_after([40.0] * 9, 4) == 10
    assert retry_after([40.0] * 9, 1) == 40
    assert retry_after([1e9], 1) <= 3600


@pytest.mark.parametrize("n_batch", [8, 100, 512])
def test_a_chunk_beside_streams_is_short(n_batch: int) -> None:
    assert chunk_rows(n_batch, False, 10.0, 0.1) == n_batch
    assert chunk_rows(n_batch, True, 0.0, 0.1) == min(LEAST_ROWS, n_batch)
    for rows_per_s in (1.0, 300.0, 5000.0, 1e6):
        for round_s in (0.001, 0.02, 0.4):
            rows = chunk_rows(n_batch, True, rows_per_s, round_s)
            assert 1 <= rows <= n_batch
            if rows > LEAST_ROWS:
                assert rows / rows_per_s <= max(0.05, round_s)


def test_rows_are_shared_out_whole() -> None:
    lot = random.Random(1)
    for _ in range(500):
        prompts = [(lot.randint(1, 900), lot.randint(0, 5)) for _ in range(lot.randint(1, 6))]
        left, turns = zip(*prompts, strict=True)
        n_rows = lot.choice([32, 64, 512])
        rows = share_rows(left, turns, n_rows)
        assert sum(rows) == min(n_rows, sum(left))
        assert all(0 <= n <= most for n, most in zip(rows, left, strict=True))
        # Nobody is served before one who has waited longer is served in full.
        for left_a, turn_a, n_a in zip(left, turns, rows, strict=True):
            for turn_b, n_b in zip(turns, rows, strict=True):
                assert not (turn_a < turn_b and n_a < left_a and n_b)


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_for_ever() -> None:
    """Beside one of 20,000 rows, short ones come whenever one of four slots is free."""
    left, turns, begun = {0: 20_000}, {0: 0}, {0: 0}
    took: dict[int, int] = {}
    for step in range(1, 400):
        while len(left) < 4 and 0 not in took:
            new = len(begun)
            left[new], turns[new], begun[new] = 100, step, step
        active = list(left)
        rows = share_rows([left[i] for i in active], [turns[i] for i in active], 256)
        for i, n in zip(active, rows, strict=True):
            left[i] -= n
            if n:
                turns[i] = step
            if not left[i]:
                took[i] = step - begun[i] + 1
                del left[i]
    assert took[0] < 2 * 20_000 / 256
    assert len(took) > 50
    assert max(n for i, n in took.items() if i) <= 6


def test_what_several_prompts_begin_with_is_decoded_for_the_first_alone() -> None:
    common = list(range(100))
    texts = [[*common, 1], [*common, 2], [7], [*common[:10], 3]]
    assert ahead(texts, [0, 0, 0, 0], 16) == [0, 2, 3]
    # The first has come so far that nothing it will decode is another's.
    assert ahead(texts, [90, 90, 0, 0], 16) == [0, 1, 2, 3]
    assert ahead([], [], 16) == []
