"""A user's line on drafting: whether it is on, why, and what looks wrong."""

import re

import pytest

from dflash_local.controller.controller import Controller
from dflash_local.controller.costs import Costs
from drafted_text import BLOCK, text
from machines import MACHINES
from rounds import play


@pytest.mark.parametrize(
    ("name", "text_name", "told"),
    [
        ("cpu-tiny", "prose", r"drafting is off: checking 2 tokens costs 2\.\d steps on this dev"),
        ("h200-8b-q4", "code", r"drafting is on: \d+\.\d tokens a round at width \d+, \d\.\d\d ti"),
        ("h200-8b-q4", "hopeless", r"drafting is off: at its best a round would give 1\.\d tok"),
        ("tiny-gpu", "hopeless", r"drafting is off: a draft alone costs (0\.[89]|1\.0) steps"),
    ],
)
def test_the_reason_in_words(name: str, text_name: str, told: str) -> None:
    machine = MACHINES[name]
    played = play(machine, text(text_name), Controller(machine.costs(1), BLOCK), [400])
    assert re.match(told, played.policies[0].reason)


def test_where_two_tokens_are_worth_their_check_the_draft_is_the_reason() -> None:
    """The tiny pair on two cores: passes of 1, 2 and 8 rows in 2.2, 3.6 and 5.8 ms."""
    costs = Costs({4: {1: 2.2e-3, 2: 3.6e-3, 8: 5.8e-3, 16: 9.6e-3}}, {4: {1: 7.7e-3}})
    chosen = Controller(costs, BLOCK)
    policy = chosen.open(4)
    chosen.n_drafts([policy], [15])
    assert policy.reason == "drafting is off: a draft alone costs 3.5 steps on this device"


def test_the_reason_before_the_first_draft() -> None:
    costs = MACHINES["h200-8b-q4"].costs(1)
    assert Controller(costs, BLOCK).open().reason == "drafting has not been tried yet"
    assert Controller(costs, 1).open().reason.startswith("no drafter: ")


def test_a_drafter_far_worse_than_it_thinks_is_told_of() -> None:
    machine = MACHINES["rtx-4090"]
    for name, warned in (
        ("over-confident", True),
        ("code", False),
        ("prose", False),
        ("certain 0.6", False),  # it gives no probabilities
    ):
        played = play(machine, text(name), Controller(machine.costs(1), BLOCK), [1000])
        warning = played.policies[0].warning
        assert (warning is not None) == warned
        if warning:
            assert "thinking mode" in warning and "fine-tune" in warning
