"""Servers in several modes, under load, with restarts. The script runs for an hour by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "server_soak.py"


@pytest.mark.slow
def test_answers_of_a_busy_server_are_those_of_a_fresh_one() -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "1", "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    for mode in found.values():
        assert mode["compared"]
        assert mode["lost"] == mode["unfinished_files"] == []
        if mode["promised"]:
            assert mode["different_texts"] == mode["different_logprobs"] == 0
    assert sum(mode["promised"] for mode in found.values()) > len(found) / 2
    assert sum(mode["left"] for mode in found.values())
