"""These tests need packages that only tests/clients/run.sh installs."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dflash_local import Embedder, load_embedder
from embedding_models import write_bert
from server_process import ServerProcess, serving

_NEEDED = {
    "test_langchain.py": "langchain_openai",
    "test_llama_index.py": "llama_index",
    "test_llm.py": "llm",
    "test_types.py": "basedpyright",
}
collect_ignore = [file for file, package in _NEEDED.items() if find_spec(package) is None]


@pytest.fixture(scope="session")
def bert_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny embedding model."""
    return write_bert(tmp_path_factory.mktemp("embedder") / "bert.gguf")


@pytest.fixture(scope="session")
def embedding_server(bert_file: Path) -> Iterator[ServerProcess]:
    """A server of that model."""
    with serving("--target", str(bert_file), "--gpu-layers", "0") as running:
        yield running


@pytest.fixture(scope="session")
def embedder(bert_file: Path) -> Iterator[Embedder]:
    """The same model in this process."""
    with load_embedder(bert_file, n_threads=1, n_gpu_layers=0, quiet=True) as loaded:
        yield loaded
