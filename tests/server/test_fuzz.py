"""Damaged requests, model files and chat templates. The script runs for an hour by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "server_fuzz.py"


@pytest.mark.slow
def test_what_is_damaged_is_answered_or_refused_in_words() -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.stdout, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["server_alive"]
    assert found["tracebacks"] == 0
    assert not any(status.startswith("5") for status in found["statuses"])
    assert {"200", "400", "404"} <= set(found["statuses"])
    tried = set(found["files"])
    assert {"inspect: refused", "load: refused", "convert: refused"} <= tried
    assert {"rendered", "refused"} <= set(found["templates"])
    assert done.returncode == 0
