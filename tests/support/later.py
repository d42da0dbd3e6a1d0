"""Large packages that few tests use: each worker imports every module of tests."""

import importlib
from typing import Any


class Later:
    """A package that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks in every name of a module for fixtures
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
