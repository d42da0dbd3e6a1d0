"""From figures to the alarm that names what is wrong."""

from dataclasses import replace

import pytest

from dflash_local.doctor.machine import Machine
from dflash_local.doctor.trial import PairTrial
from dflash_local.doctor.verdict import PairNames, alarms, verdict

WELL = PairTrial(
    tokens_per_round=4.2,
    by_prompt=(4.0, 4.2, 4.4),
    plain_speed=100.0,
    speed=180.0,
    gains=(1.7, 1.8, 1.9),
    gained_by="by the drafter",
    drafting=None,
    thinking_tokens_per_round=None,
    unknown_marks=(),
    largest_state=300.0,
)
PAIR = PairNames("target.gguf", "drafter.gguf", 1, 1, "Q4_K_M", "Qwen3 8B", "Qwen3-8B")


@pytest.fixture
def machine() -> Machine:
    return replace(Machine.here(), gpus=(), usable_gpus=(), driver=None)


def test_a_pair_in_order(machine: Machine) -> None:
    assert alarms(machine, PAIR, WELL) == []
    told = verdict([], PAIR, WELL)
    assert "1.80 times as fast as without drafts (1.70 to 1.90 by prompt), by the drafter" in told
    assert told.startswith("all is well") and "4.20 tokens per round" in told
    off = replace(WELL, speed=99.0, drafting="drafting is off: too dear")
    assert alarms(machine, PAIR, off) == []
    assert "in order" in verdict([], PAIR, off) and "too dear" in verdict([], PAIR, off)
    assert "--draft" in verdict([], replace(PAIR, drafter=None), None)


@pytest.mark.parametrize(
    ("trial", "pair", "name"),
    [
        ({"tokens_per_round": 1.05}, {}, "few_accepted"),
        ({"tokens_per_round": 1.7}, {}, "few_accepted"),
        ({"tokens_per_round": 1.05, "unknown_marks": ("<|start|>",)}, {}, "chat_template"),
        ({"tokens_per_round": 1.3, "thinking_tokens_per_round": 4.0}, {}, "thinking"),
        ({"tokens_per_round": 1.3}, {"made_for": "z/Qwen3-4B"}, "other_target"),
        ({"tokens_per_round": 2.5}, {"expected": 6.5}, "below_expected"),
        ({"largest_state": 1e6}, {}, "overflow"),
        ({"largest_state": float("inf")}, {}, "overflow"),
        ({"largest_state": float("nan")}, {}, "overflow"),
    ],
)
def test_each_fault_has_its_alarm(
    machine: Machine, trial: dict[str, object], pair: dict[str, object], name: str
) -> None:
    (found,) = alarms(machine, replace(PAIR, **pair), replace(WELL, **trial))  # type: ignore[arg-type]
    assert (found.name, found.is_fault) == (name, True)
    assert verdict([found], PAIR, WELL) == found.text and "\n" not in found.text


@pytest.mark.parametrize(
    ("gains", "said"),
    [((0.8, 1.9, 2.0), "differs between prompts"), ((0.7, 0.8, 0.9), "does not pay here")],
)
def test_a_spread_around_1_is_no_verdict(gains: tuple[float, ...], said: str) -> None:
    told = verdict([], PAIR, replace(WELL, gains=gains))
    assert said in told and "all is well" not in told and "is off" not in told


def test_less_is_asked_of_what_was_not_trained_for_its_target(machine: Machine) -> None:
    other = replace(PAIR, is_dflash=False)
    assert alarms(machine, other, replace(WELL, tokens_per_round=1.7)) == []
    (found,) = alarms(machine, other, replace(WELL, tokens_per_round=1.05))
    assert found.name == "few_accepted"


@pytest.mark.parametrize(
    ("trial", "name", "said"),
    [
        (replace(WELL, thinking_tokens_per_round=1.4), "thinking", "all is well"),
        (replace(WELL, noise="this machine is busy"), "busy", "too busy"),
    ],
)
def test_what_is_no_fault(machine: Machine, trial: PairTrial, name: str, said: str) -> None:
    found = alarms(machine, PAIR, trial)
    assert [(alarm.name, alarm.is_fault) for alarm in found] == [(name, False)]
    told = verdict(found, PAIR, trial)
    assert said in told and ("times as fast" in told) == (name != "busy")


def test_a_gpu_that_is_not_used_is_an_alarm(machine: Machine) -> None:
    (found,) = alarms(replace(machine, gpus=("NVIDIA",), driver=True), PAIR, WELL)
    assert found.name == "gpu_not_used"
