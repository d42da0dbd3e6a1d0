"""A real server process that is open to other machines, behind keys, and answers one at a time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import ServerProcess, serving
from tool_server import PLAIN

KEYS = ("first-key", "second-key")
BEARER = {"Authorization": f"Bearer {KEYS[0]}"}
FRIEND = "https://chat.example"
"""The web origin that may use it."""


@pytest.fixture(scope="session")
def guarded(
    cache_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It has two keys, an allowed origin, an allowed name, one slot, and a queue of one request
    that may wait two seconds."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(f"{KEYS[1]}\n\n")
    with serving(
        *("--host", "0.0.0.0", "--api-key", KEYS[0], "--api-key-file", str(file)),
        *("--cors-origin", FRIEND, "--allowed-host", "llm.example"),
        *("--parallel", "1", "--queue", "1", "--queue-timeout", "2", *PLAIN),
    ) as running:
        running.url = f"http://127.0.0.1:{running.port}"
        yield running
