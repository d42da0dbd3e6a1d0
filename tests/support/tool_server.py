"""A real server process whose model can call tools and think: the shipped target with the chat
template of Qwen3. It decodes plainly: a stream that is not greedy has one token in each chunk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from chat_models import with_template
from server_process import ServerProcess, serving

# Two threads that wait for each other by spinning are slow where others want the cores too.
PLAIN = ("--gpu-layers", "0", "--kv-type", "q8_0", "--draft-width", "0", "--threads", "1")


@pytest.fixture(scope="session")
def tool_server(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    target, drafter = pair
    copy = with_template(target, tmp_path_factory.mktemp("tools") / "tiny-tools.gguf", "qwen3")
    with serving("--target", str(copy), "--draft", str(drafter), *PLAIN) as running:
        yield running


@pytest.fixture
def tool_client(tool_server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of that server."""
    with tool_server.client() as connected:
        yield connected
