"""A mamba target with random weights: a model whose state cannot be rolled back."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from gguf_files import FLOAT32, UINT32, Tensor, Value, parts, write

F32 = gguf.GGMLQuantizationType.F32


def write_mamba(path: Path, source: Path, *, n_layer: int = 3, n_embd: int = 32) -> Path:
    """Write one with the vocabulary of the target at `source`, weights in F32."""
    d_conv, d_state, dt_rank, d_inner = 4, 8, 2, 2 * n_embd
    of_source, _ = parts(source)
    n_vocab = len(of_source["tokenizer.ggml.tokens"][0])
    keys: dict[str, Value] = {
        "general.architecture": ("mamba", gguf.GGUFValueType.STRING, None),
        "mamba.attention.layer_norm_rms_epsilon": (1e-6, FLOAT32, None),
    }
    for name, number in {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": n_embd,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": dt_rank,
    }.items():
        keys[f"mamba.{name}"] = (number, UINT32, None)
    keys |= {name: value for name, value in of_source.items() if name.startswith("tokenizer.")}

    random = np.random.default_rng(3)

    def normal(*shape: int, gain: float = 1.0) -> NDArray[Any]:
        values = random.standard_normal(shape) * gain / np.sqrt(shape[-1])
        return values.astype(np.float32)

    arrays: dict[str, NDArray[Any]] = {
        "token_embd.weight": normal(n_vocab, n_embd, gain=2),
        "output_norm.weight": np.ones(n_embd, np.float32),
    }
    for layer in range(n_layer):
        arrays |= {
            f"blk.{layer}.{name}": array
            for name, array in {
                "attn_norm.weight": np.ones(n_embd, np.float32),
                "ssm_in.weight": normal(2 * d_inner, n_embd, gain=2),
                "ssm_conv1d.weight": normal(d_inner, d_conv),
                "ssm_conv1d.bias": normal(d_inner),
                "ssm_x.weight": normal(dt_rank + 2 * d_state, d_inner, gain=2),
                "ssm_dt.weight": normal(d_inner, dt_rank),
                "ssm_dt.bias": normal(d_inner),
                "ssm_a": -np.exp(normal(d_inner, d_state)),
                "ssm_d": np.ones(d_inner, np.float32),
                "ssm_out.weight": normal(n_embd, d_inner, gain=2),
            }.items()
        }
    tensors: dict[str, Tensor] = {name: (array, F32) for name, array in arrays.items()}
    return write(path, keys, tensors)
