"""What rows that are decoded again cost, and when a plain step is better than one more draft."""

from __future__ import annotations

import math
import random

import pytest

from dflash_local.pays.again import Again
from dflash_local.pays.controller import Controller
from dflash_local.pays.costs import Costs
from simulation import BLOCK, CODE, DEPTH, MACHINES, TEXTS, Machine, Text, chain

ROWS = (1, 2, 4, 8, 16, 32, 64)


def known(costs: Costs, n_rows: int, n_kept: int) -> Again:
    again = Again(costs)
    again.observe(n_rows, n_kept, verified=True)
    return again


def test_nothing_is_known_before_the_first_draft() -> None:
    again = Again(Costs({0: {1: 1.0}}, {0: {1: 1.0}}))
    assert again.usual == 0 and math.isinf(again.most(1, 0, 0.0))


def test_where_each_row_costs_as_much_none_is_decoded_twice_with_a_draft() -> None:
    by_row = Costs({0: {n: float(n) for n in ROWS}}, {0: {1: 1.0}})
    assert known(by_row, 16, 6).most(1, 0, 0.0) < 6


def test_where_rows_cost_nothing_they_gather() -> None:
    flat = Costs({0: dict.fromkeys(ROWS, 1.0)}, {0: {1: 1.0}})
    assert known(flat, 16, 6).most(1, 0, 0.0) > 32


def test_rows_of_a_plain_step_are_those_of_the_drafts_before_it() -> None:
    again = known(Costs({0: {1: 1.0}}, {0: {1: 1.0}}), 8, 3)
    for _ in range(60):
        again.now = 0
        again.observe(8, 3, verified=True)
        again.now = 3
        again.observe(1, 1, verified=False)
    assert again.usual == 3


def rate(machine: Machine, text: Text, controller: Controller | None, n: int = 1500) -> float:
    """Tokens a second of one long answer whose rejected drafts leave rows to decode again; without
    a controller, of plain steps."""
    rng, luck = random.Random(1), random.Random(2)
    policy = controller.open(DEPTH) if controller else None
    done = n_again = last = 0
    seconds = 0.0
    while done < n:
        drafted, chances, width = False, [], 1
        if controller and policy:
            limit = 0 if n_again > min(controller.most_again(1), 32) else BLOCK - 1
            controller.again.now = n_again
            drafted = controller.n_drafts([policy], [limit])[0] > 0
            if drafted:
                logprobs, chances = text(rng, done / n)
                (width,) = controller.rows(controller.chances([policy], [chain(logprobs)], [limit]))
        rows = n_again + width
        draft_s = 1e-3 * machine.drafts(1) if drafted else 0.0
        step_s = 1e-3 * (machine.step(rows) + (machine.switch if rows != last else 0.0))
        host_s = 1e-3 * (machine.host + (machine.draft_host if drafted else 0.0))
        right = 0
        while right < len(chances) and luck.random() < chances[right]:
            right += 1
        kept = min(right, width - 1)
        if controller and policy:
            if drafted:
                tokens = [0] * kept + [int(kept == right)]
                controller.observe(policy, chain(logprobs).clip(width - 1), tokens)
            controller.observe_round(rows, "chain", drafted, DEPTH, draft_s, step_s, host_s)
        n_again = 0 if kept + 1 == width else n_again + kept + 1
        seconds += draft_s + step_s + host_s
        done, last = done + kept + 1, rows
    return done / seconds


def of(machine: Machine) -> Controller:
    return Controller(machine.costs(1), BLOCK)


@pytest.mark.one_in(30)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("text", ["hopeless", "prose", "code"])
def test_drafting_is_hardly_ever_slower_than_plain_decoding(name: str, text: str) -> None:
    machine = MACHINES[name]
    plain = rate(machine, TEXTS[text], None)
    assert rate(machine, TEXTS[text], of(machine)) > 0.97 * plain


@pytest.mark.parametrize("name", ["moe", "h200-q4_k_m", "rtx-4090"])
def test_it_pays_where_drafts_are_good(name: str) -> None:
    machine = MACHINES[name]
    assert rate(machine, CODE, of(machine)) > 1.15 * rate(machine, CODE, None)
