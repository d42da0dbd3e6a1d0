"""A server under many clients, hostile requests, damaged files and restarts: the scripts of
`lab/server`, which run for an hour, or with thousands of requests, by hand."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server_process import EXACT, SERVE, ServerProcess, serving

ROOT = Path(__file__).parents[3]
ANSWERED = ("chat", "chat_streamed", "completion", "infill", "schema")
GROWTH_MIB = 32  # what answers of other lengths and shapes may still add after the first half


def found_by(script: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The report of a script of `lab/server`."""
    command = [sys.executable, "-m", f"lab.server.{script}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.stdout, done.stderr
    print(done.stdout)
    assert done.returncode == code
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_every_request_is_answered_and_nothing_is_left_behind() -> None:
    # Of threads that overlap on a busy machine each has an arena of its own, which is no leak.
    one_arena = ("env", "MALLOC_ARENA_MAX=1", *SERVE)
    with serving(*EXACT, "--parallel", "4", "--queue", "8", command=one_arena) as server:
        pid = str(server.process.pid) if Path("/proc").is_dir() else None
        watched = ("--pid", pid) if pid else ()
        found = load(server, "--requests", "120", "--clients", "16", *watched)
        assert not found["failures"]
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


@pytest.mark.slow
def test_the_load_script_tells_of_requests_that_fail(guarded: ServerProcess) -> None:
    found = load(guarded, "--requests", "12", "--clients", "4", "--key", "wrong", code=1)
    assert any("401" in failure for failure in found["failures"])


def load(server: ServerProcess, *arguments: str, code: int = 0) -> dict[str, Any]:
    return found_by("load", "--url", server.url, *arguments, code=code)


@pytest.mark.slow
def test_no_hostile_request_stops_the_others() -> None:
    found = found_by("attack", "--minutes", "0.1")
    assert found["failures"] == found["stalls"] == []
    assert found["tracebacks"] == 0
    assert found["rounds"] and {"200", "400"} <= set(found["statuses"])


@pytest.mark.slow
def test_it_ends_at_once_in_the_middle_of_an_attack() -> None:
    with serving(*EXACT) as server:

        def attack() -> bool:
            """Whether it was answered."""
            with server.client() as client, contextlib.suppress(httpx.HTTPError):
                body = {"content": "<|im_start|>" * 80_000}
                return client.post("/tokenize", json=body).status_code == 200
            return False

        with ThreadPoolExecutor(45) as threads:
            attacks = [threads.submit(attack) for _ in range(45)]
            time.sleep(1)
            server.send(signal.SIGINT)
            assert server.wait() == 128 + signal.SIGINT
        assert not all(each.result() for each in attacks)


@pytest.mark.slow
def test_what_is_damaged_is_answered_or_refused_in_words() -> None:
    found = found_by("fuzz", "--minutes", "0.5")
    assert found["failures"] == []
    assert found["server_alive"]
    assert found["tracebacks"] == 0
    assert not any(status.startswith("5") for status in found["statuses"])
    assert {"200", "400", "404"} <= set(found["statuses"])
    tried = set(found["files"])
    assert {"inspect: refused", "load: refused", "convert: refused"} <= tried
    assert {"rendered", "refused"} <= set(found["templates"])


@pytest.mark.slow
def test_answers_of_a_busy_server_are_those_of_a_fresh_one() -> None:
    found = found_by("soak", "--minutes", "0.1", "--seconds", "4")
    for mode in found.values():
        assert mode["compared"]
        assert mode["lost"] == mode["unfinished_files"] == []
        if mode["promised"]:
            assert mode["different_texts"] == mode["different_logprobs"] == 0
    assert sum(mode["promised"] for mode in found.values()) > len(found) / 2
    assert sum(mode["left"] for mode in found.values())
