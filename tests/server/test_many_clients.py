"""A server under many clients, some of them rude. The script runs with 2,000 requests by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server_process import EXACT, ServerProcess, serving

SCRIPT = Path(__file__).parents[2] / "tools" / "server_load.py"
ANSWERED = ("chat", "chat_streamed", "completion", "infill", "schema")
GROWTH_MIB = 64  # what answers of other lengths and shapes may still add after the first half


def load(server: ServerProcess, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--url", server.url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr
    return json.loads(done.stdout) | {"code": done.returncode}


@pytest.mark.slow
def test_every_request_is_answered_and_nothing_is_left_behind() -> None:
    with serving(*EXACT, "--parallel", "4", "--queue", "8") as server:
        pid = str(server.process.pid) if Path("/proc").is_dir() else None
        watched = ("--pid", pid) if pid else ()
        found = load(server, "--requests", "120", "--clients", "16", *watched)
        assert not found["failures"]
        assert found["code"] == 0
        outcomes = found["outcomes"]
        assert sum(outcomes.values()) == 120
        assert all(outcomes[f"{kind}: answered"] for kind in ANSWERED)
        assert outcomes["malformed: refused"]
        if pid:
            assert found["memory_mib"][-1] < found["memory_mib"][1] + GROWTH_MIB
        assert not any("Traceback" in line for line in server.log)
        with server.client() as client:
            slots = client.get("/slots").json()
            assert len(slots) == 4
            assert not any(slot["is_processing"] for slot in slots)


def test_the_script_tells_of_requests_that_fail(guarded: ServerProcess) -> None:
    found = load(guarded, "--requests", "12", "--clients", "4", "--key", "wrong")
    assert found["code"] == 1
    assert any("401" in failure for failure in found["failures"])
