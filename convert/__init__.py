"""Published DFlash drafters to GGUF.

>>> from dflash_local.convert import convert
>>> convert("z-lab/Qwen3-8B-DFlash-b16", target="Qwen3-8B-Q4_K_M.gguf").path
"""

from .conversion import ConvertResult, convert

__all__ = ["ConvertResult", "convert"]
