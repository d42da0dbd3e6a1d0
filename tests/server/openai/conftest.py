"""OpenAI's own Python SDK, connected to the servers that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from later import Later
from server_process import ServerProcess

openai = Later("openai")


def connect(server: ServerProcess) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, timeout=120)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http
    )


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="module")
def tool_sdk(tool_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connect(tool_server) as connected:
        yield connected
