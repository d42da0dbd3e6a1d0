"""These tests need packages that only tests/clients/run.sh installs."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = {
    "test_langchain.py": "langchain_openai",
    "test_llama_index.py": "llama_index",
    "test_llm.py": "llm",
    "test_types.py": "basedpyright",
}
collect_ignore = [file for file, package in _NEEDED.items() if find_spec(package) is None]
