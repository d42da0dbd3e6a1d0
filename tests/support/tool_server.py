"""A real server process whose model can call tools and think: the mini target with the chat
template of Qwen3. It decodes plainly, a step at a time: a stream has one token in each chunk."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import mini_pair
from chat_models import with_template
from server_process import ServerProcess, serving

SERVE_STEP_BY_STEP = """
import sys
from dflash_local.cli.main import main
from dflash_local.engine import plain_steps

plain_steps._AHEAD_S = 0.0
sys.exit(main())
"""
# Two threads that wait for each other by spinning are slow where others want the cores too.
PLAIN = ("--gpu-layers", "0", "--kv-type", "q8_0", "--draft-width", "0", "--threads", "1")


@contextmanager
def serving_tools(pair: tuple[Path, Path], folder: Path) -> Iterator[ServerProcess]:
    """A pair of the tiny pair's tokens, as `tiny-tools`."""
    copy = with_template(pair[0], folder / "tiny-tools.gguf", "qwen3")
    command = (sys.executable, "-c", SERVE_STEP_BY_STEP, "serve", "--port", "0")
    arguments = ("--target", str(copy), "--draft", str(pair[1]), *PLAIN)
    with serving(*arguments, command=command) as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(
    cache_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with serving_tools(mini_pair.pair(), tmp_path_factory.mktemp("tools")) as running:
        yield running


@pytest.fixture
def tool_client(tool_server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of that server."""
    with tool_server.client() as connected:
        yield connected
