"""Published DFlash drafters to GGUF.

>>> from dflash_local.convert import convert
>>> convert("z-lab/Qwen3-8B-DFlash-b16", target="Qwen3-8B-Q4_K_M.gguf").path
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conversion import ConvertResult, convert

__all__ = ["ConvertResult", "convert"]


def __getattr__(name: str) -> Any:
    """Load what converts when it is first needed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.conversion"), name)
    globals()[name] = value
    return value
