"""A mamba target with random weights: a model whose state cannot be rolled back."""

from pathlib import Path

import numpy as np

from gguf_files import keys_of
from random_model import RandomModel

N_LAYER, N_EMBD = 3, 32
KERNEL, STATE, RANK, INNER = 4, 8, 2, 2 * N_EMBD


def write_mamba(path: Path, source: Path) -> Path:
    """Write one with the vocabulary of the target at `source`, weights in F32."""
    model = RandomModel("mamba", "F32", 3)
    model.keys |= {k: v for k, v in keys_of(source).items() if k.startswith("tokenizer.")}
    model.numbers(
        block_count=N_LAYER,
        context_length=4096,
        embedding_length=N_EMBD,
        feed_forward_length=0,
        attention__head_count=0,
        attention__layer_norm_rms_epsilon=1e-6,
        ssm__conv_kernel=KERNEL,
        ssm__inner_size=INNER,
        ssm__state_size=STATE,
        ssm__time_step_rank=RANK,
    )
    model.matrix("token_embd.weight", len(model.keys["tokenizer.ggml.tokens"][0]), N_EMBD, gain=2)
    model.plain("output_norm.weight", np.ones(N_EMBD))
    for layer in range(N_LAYER):
        block = f"blk.{layer}."
        model.plain(block + "attn_norm.weight", np.ones(N_EMBD))
        model.matrix(block + "ssm_in.weight", 2 * INNER, N_EMBD, gain=2)
        model.matrix(block + "ssm_conv1d.weight", INNER, KERNEL)
        model.matrix(block + "ssm_conv1d.bias", INNER)
        model.matrix(block + "ssm_x.weight", RANK + 2 * STATE, INNER, gain=2)
        model.matrix(block + "ssm_dt.weight", INNER, RANK)
        model.matrix(block + "ssm_dt.bias", INNER)
        model.plain(block + "ssm_a", -np.exp(model.normal(block + "a", INNER, STATE) / STATE**0.5))
        model.plain(block + "ssm_d", np.ones(INNER))
        model.matrix(block + "ssm_out.weight", N_EMBD, INNER, gain=2)
    return model.write(path)
