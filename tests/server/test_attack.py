"""Hostile requests, all at once: none stops the event loop, or the answers to others. The script
runs for an hour by hand."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from dflash_local import demo
from server_process import EXACT, serving

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "tools" / "server_attack.py"


def test_no_request_stops_the_others() -> None:
    command = [sys.executable, str(SCRIPT), "--minutes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.stdout, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert found["failures"] == found["stalls"] == []
    assert found["tracebacks"] == 0
    assert found["rounds"] and {"200", "400"} <= set(found["statuses"])
    assert done.returncode == 0


def test_it_ends_at_once_in_the_middle_of_an_attack() -> None:
    target, drafter = map(str, demo.pair())
    with serving("--target", target, "--draft", drafter, *EXACT) as server:

        def attack(_: int) -> None:
            with server.client() as client, contextlib.suppress(httpx.HTTPError):
                client.post("/tokenize", json={"content": "<|im_start|>" * 80_000})

        with ThreadPoolExecutor(45) as threads:
            for i in range(45):
                threads.submit(attack, i)
            time.sleep(1)
            server.send(signal.SIGINT)
            start = time.monotonic()
            server.wait(60)
            assert time.monotonic() - start < 20
