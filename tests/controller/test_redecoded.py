"""What rows that are decoded again cost, and when a plain step is better than one more draft."""

from __future__ import annotations

import math

import pytest

from dflash_local.controller.controller import Controller
from dflash_local.controller.costs import Costs
from dflash_local.controller.redecoded import Redecoded
from dflash_local.draft.draft import Draft
from drafted_text import BLOCK, Text, text
from machines import MACHINES, Machine
from rounds import emitted

ROWS = (1, 2, 4, 8, 16, 32, 64)


def known(costs: Costs, n_rows: int, n_kept: int) -> Redecoded:
    redecoded = Redecoded(costs)
    redecoded.observe(n_rows, n_kept, verified=True)
    return redecoded


def test_nothing_is_known_before_the_first_draft() -> None:
    redecoded = Redecoded(Costs({0: {1: 1.0}}, {0: {1: 1.0}}))
    assert redecoded.usual == 0 and math.isinf(redecoded.most(1, 0, 0.0))


def test_where_each_row_costs_as_much_none_is_decoded_twice_with_a_draft() -> None:
    by_row = Costs({0: {n: float(n) for n in ROWS}}, {0: {1: 1.0}})
    assert known(by_row, 16, 6).most(1, 0, 0.0) < 6


def test_where_rows_cost_nothing_they_gather() -> None:
    flat = Costs({0: dict.fromkeys(ROWS, 1.0)}, {0: {1: 1.0}})
    assert known(flat, 16, 6).most(1, 0, 0.0) > 32


def test_rows_of_a_plain_step_are_those_of_the_drafts_before_it() -> None:
    redecoded = known(Costs({0: {1: 1.0}}, {0: {1: 1.0}}), 8, 3)
    for _ in range(60):
        redecoded.now = 0
        redecoded.observe(8, 3, verified=True)
        redecoded.now = 3
        redecoded.observe(1, 1, verified=False)
    assert redecoded.usual == 3


def rate(machine: Machine, text: Text, chosen: Controller | None, n: int = 1000) -> float:
    """Tokens a second of one long answer whose rejected drafts leave rows to decode again; without
    a controller, of plain steps."""
    policy = chosen.open(200) if chosen else None
    places = text.answer(n + BLOCK, 1)
    done = n_left = last = 0
    seconds = 0.0
    while done < n:
        draft, n_kept = Draft.chain([]), 0
        drafted = False
        if chosen and policy:
            limit = 0 if n_left > min(chosen.most_redecoded(1), 32) else BLOCK - 1
            chosen.redecoded.now = n_left
            drafted = chosen.n_drafts([policy], [limit])[0] > 0
            if drafted:
                draft = places[done].proposal
                draft = draft.clip(chosen.rows(chosen.chances([policy], [draft], [limit]))[0] - 1)
                tokens = emitted(draft, places[done].written)
                n_kept = len(tokens) - 1
                chosen.observe(policy, draft, tokens)
        rows = n_left + 1 + len(draft)
        draft_s = 1e-3 * machine.drafts(1) if drafted else 0.0
        step_s = 1e-3 * (machine.step(rows) + (machine.switch if rows != last else 0.0))
        host_s = 1e-3 * (machine.host + (machine.draft_host if drafted else 0.0))
        if chosen:
            chosen.observe_round(rows, "chain", int(drafted), 200, draft_s, step_s, host_s)
        n_left = 0 if n_kept == len(draft) else n_left + n_kept + 1
        seconds += draft_s + step_s + host_s
        done, last = done + n_kept + 1, rows
    return done / seconds


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", [name for name in MACHINES if MACHINES[name].busy == 1.0])
@pytest.mark.parametrize("text_name", ["hopeless", "prose", "code"])
def test_drafting_is_hardly_ever_slower_than_plain_decoding(name: str, text_name: str) -> None:
    machine = MACHINES[name]
    plain = rate(machine, text(text_name), None)
    chosen = Controller(machine.costs(1), BLOCK)
    assert rate(machine, text(text_name), chosen) > 0.93 * plain


@pytest.mark.parametrize("name", ["moe", "h200-8b-q4", "rtx-4090"])
def test_it_pays_where_drafts_are_good(name: str) -> None:
    machine = MACHINES[name]
    chosen = Controller(machine.costs(1), BLOCK)
    assert rate(machine, text("code"), chosen) > 1.15 * rate(machine, text("code"), None)
