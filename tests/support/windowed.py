"""A target whose layers look back at a window of tokens only, but for every sixth: a Qwen3 target
under the name of an architecture that does so. Its texts are nonsense, and as good as any."""

from pathlib import Path

import gguf
import numpy as np

from gguf_files import UINT32, Tensor, Value, parts, write

_ARCHITECTURE = "gemma3"
_PERIOD = 6
"""Of so many layers the last has no window. A target of fewer gets its layers again."""


def write_windowed(path: Path, source: Path, window: int) -> Path:
    """The Qwen3 target `source` with windows, its weights in F32."""
    keys, tensors = parts(source)
    renamed: dict[str, Value] = {
        name.replace("qwen3.", f"{_ARCHITECTURE}."): value for name, value in keys.items()
    }
    renamed["general.architecture"] = (_ARCHITECTURE, *keys["general.architecture"][1:])
    renamed[f"{_ARCHITECTURE}.attention.sliding_window"] = (window, UINT32, None)
    f32 = gguf.GGMLQuantizationType.F32
    weights: dict[str, Tensor] = {
        name: (gguf.quants.dequantize(data, kind).astype(np.float32), f32)
        for name, (data, kind) in tensors.items()
    }
    n_embd, n_layer = keys["qwen3.embedding_length"][0], keys["qwen3.block_count"][0]
    for layer in range(n_layer, _PERIOD):
        block = f"blk.{layer % n_layer}."
        for name in [name for name in weights if name.startswith(block)]:
            weights[name.replace(block, f"blk.{layer}.")] = weights[name]
    n_layer = max(n_layer, _PERIOD)
    renamed[f"{_ARCHITECTURE}.block_count"] = (n_layer, UINT32, None)
    for layer in range(n_layer):
        for name in ("post_attention_norm", "post_ffw_norm"):
            weights[f"blk.{layer}.{name}.weight"] = (np.full(n_embd, 0.3, np.float32), f32)
    return write(path, renamed, weights)
