"""The programs in examples/ run as they are, and do what they say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"


def output(name: str) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_test_for_each() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in FOLDER.glob("*.py")} <= tests


@pytest.mark.slow
def test_chat() -> None:
    at_hand, whole = re.search(r"(\d+) of (\d+) prompt tokens", output("chat")).groups()
    assert 0 < int(at_hand) < int(whole)


@pytest.mark.slow
def test_streaming() -> None:
    told = output("streaming").lower()
    assert all(topic in told for topic in ("sea", "clock", "bread"))


@pytest.mark.slow
def test_json_schema() -> None:
    assert set(json.loads(output("json_schema"))) == {"name", "arguments", "pure"}


@pytest.mark.slow
def test_hidden_states() -> None:
    assert int(re.search(r": (\d+)% of", output("hidden_states"))[1]) > 80


@pytest.mark.slow
def test_own_drafter() -> None:
    tokens, passes = re.search(r"(\d+) tokens in (\d+) passes", output("own_drafter")).groups()
    assert int(passes) < int(tokens) / 2
