"""OpenAI's own Node SDK against a real server: its assumptions hold.

Each `*.test.js` is a run of Node's own test runner; its output is shown if one fails.
"""

import os
import subprocess
from pathlib import Path

import pytest

from server_process import ServerProcess

FOLDER = Path(__file__).parent
NODE = os.environ.get("DFLASH_LOCAL_NODE", "node")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.test.js")), ids=lambda path: path.stem)
def test_node(path: Path, server: ServerProcess, tool_server: ServerProcess) -> None:
    urls = {"DFLASH_LOCAL_URL": server.url, "DFLASH_LOCAL_TOOL_URL": tool_server.url}
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=spec", str(path)],
        env={**os.environ, **urls},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
