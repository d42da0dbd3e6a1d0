"""OpenAI's own Node SDK against a real server: its assumptions hold.

Each `*.test.js` is a run of Node's own test runner; its output is shown if one fails.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import ServerProcess
from tool_server import serving_tools

FOLDER = Path(__file__).parent
NODE = os.environ.get("DFLASH_LOCAL_NODE", "node")


@pytest.fixture(scope="session")
def trained_tools(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of tools whose model ends the arguments of a call. One of random weights may write
    spaces between them until the context is full."""
    with serving_tools(pair, tmp_path_factory.mktemp("tools")) as running:
        yield running


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.test.js")), ids=lambda path: path.stem)
def test_node(path: Path, server: ServerProcess, trained_tools: ServerProcess) -> None:
    urls = {"DFLASH_LOCAL_URL": server.url, "DFLASH_LOCAL_TOOL_URL": trained_tools.url}
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=spec", str(path)],
        env={**os.environ, **urls},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
