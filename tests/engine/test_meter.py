"""Rounds are counted and timed as they were, for the statistics and for the controller."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import tiny_coder
from adversarial import Script, ScriptedDrafter, right_for
from dflash_local.draft.draft import Draft
from dflash_local.draft.drafter import DraftRequest
from dflash_local.engine.engine import Engine
from dflash_local.stats import Stats
from dflash_local.target_model.target import Target
from elsewhere import CHEAP, Elsewhere
from pair_engine import open_target, request
from plain_answer import PlainAnswer

N = 24


class Listening(Elsewhere):
    """Keeps what it is told of each round, and thinks that drafts cost next to nothing."""

    def __init__(self) -> None:
        super().__init__(CHEAP)
        self.told: list[dict[str, Any]] = []

    def observe_round(self, *given: Any, **named: Any) -> None:
        names = "n_rows", "shape", "n_drafting", "depth", "draft_s", "verify_s", "host_s"
        self.told.append(dict(zip(names, given, strict=True)) | named)
        super().observe_round(*given, **named)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target(n_seq=2) as opened:
        yield opened


def test_the_controller_is_told_of_each_round(target: Target) -> None:
    """Of all rows: those verified, those injected, and those of a neighbour without a policy."""
    known = PlainAnswer(target, tiny_coder.prompts()["code"][0], N)
    drafter = ScriptedDrafter(right_for(known.text, lambda: 3, target.n_vocab), n_seq=2)
    listening = Listening()
    engine = Engine(target, drafter, 2, listening)
    auto = engine.begin(request(known.prompt, "auto", N))
    engine.run([auto])
    told, stats = listening.told, auto.stats
    assert auto.tokens == known.tokens
    assert sum(each["n_rows"] - 1 for each in told) == stats.drafted > 0
    drafted = [each for each in told if each["n_drafting"]]
    assert stats.rounds == len(told) and len(drafted) > 2
    injected = sum(each["n_injected"] for each in drafted)
    # Those of the last round are injected after it.
    assert 0 < len(known.text) - 1 - injected < 16
    assert all(each["shape"] == "chain" and each["n_others"] == 0 for each in told)
    assert all(each["draft_s"] > 0 for each in drafted)
    assert all(each["verify_s"] > 0 and each["host_s"] > 0 for each in told)
    engine.slots.forget_all()
    listening.told.clear()
    both = [engine.begin(request(known.prompt, width, N)) for width in ("auto", 4)]
    engine.run(both)
    assert {each["n_others"] for each in listening.told} >= {1}
    engine.slots.forget_all()


class Watching(ScriptedDrafter):
    """Notes how many rounds were told of when it begins a draft, and when it is read."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, n_seq=2)
        self.stats = Stats()
        self.told: list[tuple[int, int]] = []

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        super().begin(requests)
        self._before = self.stats.rounds

    def read(self) -> list[Draft]:
        self.told.append((self._before, self.stats.rounds))
        return super().read()


def test_a_drafted_round_is_told_while_the_next_one_drafts(target: Target) -> None:
    """And before, where another sequence comes or goes; in the end nothing is left to tell."""
    known = PlainAnswer(target, tiny_coder.prompts()["code"][0], N)
    drafter = Watching(right_for(known.text, lambda: 2, target.n_vocab))
    engine = Engine(target, drafter, 2)
    engine.meter.overlaps = True
    told: list[int] = []
    engine.meter.when_told = lambda: told.append(len(first.tokens))
    first = engine.begin(request(known.prompt, 4, N))
    drafter.stats = first.stats
    for _ in range(5):  # the prompt, and four rounds
        engine.step([first])
    assert drafter.told == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert first.stats.rounds == 3
    assert told == [4, 7, 10]  # a round's tokens can be handed out while the next one drafts
    second = engine.begin(request(known.prompt[:8], 0, N))
    assert first.stats.rounds == 4
    engine.step([first, second])  # its prompt, and a round of the other
    engine.step([first, second])
    assert first.stats.rounds == 5
    engine.end(second)
    assert first.stats.rounds == 6 and second.stats.rounds == 1
    engine.step([first])
    engine.end(first)
    assert first.stats.rounds == 7
    assert first.tokens == known.tokens[: len(first.tokens)]
    assert first.stats.emitted == len(first.tokens) == 1 + 7 + first.stats.accepted
    engine.slots.forget_all()
