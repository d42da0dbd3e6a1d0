"""The APIs' own Python clients, connected to a server.

They are large packages that few tests use, and each worker imports every module of tests: so they
are imported when something of them is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

import httpx

from server_process import ServerProcess


class Later:
    """A package that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks in every name of a module for fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


anthropic, ollama, openai = map(Later, ("anthropic", "ollama", "openai"))


def of_openai(server: ServerProcess, **more: Any) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, timeout=120)
    options = {"api_key": "unused", "max_retries": 0, "http_client": http, **more}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


def of_anthropic(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def of_ollama(server: ServerProcess) -> ollama.Client:
    return ollama.Client(host=server.url, trust_env=False, timeout=120)
