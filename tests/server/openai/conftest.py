"""OpenAI's own Python SDK, connected to the servers that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api_clients import of_openai, openai
from server_process import ServerProcess


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with of_openai(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def tool_sdk(tool_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with of_openai(tool_server) as connected:
        yield connected
