"""DFlash speculative decoding on GGUF models.

>>> import dflash_local
>>> model = dflash_local.load("qwen3-8b")  # or load("target.gguf", "drafter.gguf")
>>> model.generate("def add(a, b):", max_tokens=32).text

Bad input raises `InputError`, and every error of this package is a `DflashError`: see
`help(dflash_local.errors)`. `Options` are those of a request; `Target` is a model in token ids.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.errors import (
    BackendError,
    ClosedError,
    ContextFullError,
    DflashError,
    FileError,
    GrammarError,
    InputError,
    PairError,
    PromptTooLongError,
)

if TYPE_CHECKING:
    __version__: str
    from dflash_local.embedder import Embedder, load_embedder
    from dflash_local.llama_facade import Llama
    from dflash_local.loading import load
    from dflash_local.model import Model
    from dflash_local.options import Options
    from dflash_local.result import Chunk, Result
    from dflash_local.stats import Stats
    from dflash_local.target_model.target import Target

__all__ = [
    "BackendError", "Chunk", "ClosedError", "ContextFullError", "DflashError", "Embedder",
    "FileError", "GrammarError", "InputError", "Llama", "Model", "Options", "PairError",
    "PromptTooLongError", "Result", "Stats", "Target", "__version__", "load", "load_embedder",
]  # fmt: skip

_HOMES = {
    "Embedder": "embedder",
    "load_embedder": "embedder",
    "load": "loading",
    "Llama": "llama_facade",
    "Model": "model",
    "Options": "options",
    "Chunk": "result",
    "Result": "result",
    "Stats": "stats",
    "Target": "target_model.target",
}


# An editable install adds the checkout, and help() would list all that lies beside the package.
__path__ = [path for path in __path__ if Path(path).name == __name__]


def __getattr__(name: str) -> Any:
    """Load llama.cpp when it is first needed, not for `--help` or to check a file."""
    if name == "__version__":
        from dflash_local.version import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"dflash_local.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names that help() lists: among all errors, 76 lines each, nobody would find `load`."""
    most = {name for name in __all__ if not name.endswith(("Error", "Options", "Target"))}
    return sorted(most | {name for name in globals() if name.startswith("__")})
