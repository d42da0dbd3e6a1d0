"""What drafting may lose before it ends, and when it may begin again."""

from __future__ import annotations

from dflash_local.pays.budget import Budget

WAY = 10.0


def spell(budget: Budget, gained: float, n_rounds: int, now: int = 0) -> int:
    budget.begin()
    for i in range(n_rounds):
        budget.settle(gained, now + i, WAY)
    budget.end()
    return now + n_rounds


def test_each_spell_that_lost_doubles_what_the_next_must_be_worth() -> None:
    budget = Budget()
    found = [budget.caution]
    for _ in range(3):
        spell(budget, -0.5, 8)
        found.append(budget.caution)
    assert found == [1, 2, 4, 8]
    spell(budget, 0.5, 40)
    assert budget.caution == 1


def test_what_is_lost_is_waited_for() -> None:
    """The longer, the dearer the way to drafting is, and the more often it has lost."""
    budget, waits = Budget(), []
    now = 0
    for way in (1.0, 10.0):
        for _ in range(2):
            budget.begin()
            while budget.suspended_until <= now:
                now += 1
                budget.settle(-1.0, now, way)
            budget.end()
            waits.append(budget.suspended_until - now)
            now = budget.suspended_until
    assert waits == sorted(waits)
    assert waits[0] < 128 < waits[-1]


def test_drafts_of_a_drafter_that_is_not_known_leave_no_debt_and_probes_do() -> None:
    budget = Budget()
    for _ in range(10):
        budget.settle_unknown(-3.0)
    budget.earn(100)
    assert budget.amount > 0.5
    budget.settle_probe(-3.0)
    assert budget.amount < -2.0


def test_texts_in_which_drafting_lost_do_not_end_it_for_those_after_them() -> None:
    budget = Budget()
    for _ in range(20):
        spell(budget, -1.0, 8)
    assert budget.caution == 16
    budget.renew()
    assert budget.caution == 4
    spell(budget, 0.5, 40)
    assert budget.caution == 1
