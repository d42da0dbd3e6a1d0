"""A pair that takes a tenth of the tiny pair's time, where no trained weights are needed.

Its target's next token hangs mostly on the one before it, and a bit on the whole text. Its drafter,
a DSpark, has the first part in its Markov head: it is right for some tokens, then wrong. No answer
comes to an end by itself.
"""

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import tiny_coder
from gguf_files import UINT32, keys_of
from random_model import RandomModel
from synthetic import add_layer, shape_keys

N_EMBD, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF = 64, 2, 1, 32, 128
FOLDER = Path()
"""The files' folder: one of pytest's, which it removes again."""
PEAK = 6.0
"""Standard deviation of logits: a draw takes the likeliest token about half of the time."""
ADDED = 0.05
"""What the layers add to a token, of what they would by themselves."""


def drafter_of(target: Path) -> Path:
    """The drafter of one of these targets, else the tiny pair's."""
    if target.parent == FOLDER:
        return target.with_name(target.name.replace("target", "drafter"))
    return tiny_coder.pair()[1]


@cache
def pair(quant: str = "Q8_0") -> tuple[Path, Path]:
    """Paths of the target and of the drafter, in Q8_0 or in F32, with the tiny pair's tokens."""
    tokens = {k: v for k, v in keys_of(tiny_coder.pair()[0]).items() if k.startswith("tokenizer.")}
    n_vocab = len(tokens["tokenizer.ggml.tokens"][0])

    target = _model("qwen3", quant, 2, tokens)
    embedded = target.normal("token_embd.weight", n_vocab, N_EMBD)
    logits = target.normal("output.weight", n_vocab, N_EMBD) * np.float32(PEAK / np.sqrt(N_EMBD))
    logits[np.equal(tokens["tokenizer.ggml.token_type"][0], gguf.TokenType.CONTROL)] = 0
    target.packed("token_embd.weight", embedded)
    target.packed("output.weight", logits)
    target.norm("output_norm.weight", N_EMBD)

    drafter = _model("dflash", quant, 1, tokens)
    drafter.key("block_size", 16)
    drafter.key("target_layers", [1])
    drafter.key("sample_from_anchor", False)
    drafter.keys["tokenizer.ggml.mask_token_id"] = (n_vocab - 1, UINT32, None)
    drafter.matrix("fc.weight", N_EMBD, N_EMBD)
    drafter.norm("enc.output_norm.weight", N_EMBD)
    drafter.plain("output_norm.weight", np.full(N_EMBD, 0.05))
    size = np.sqrt(np.square(embedded).mean(1, keepdims=True))
    drafter.packed("markov_w1.weight", embedded / size * target.tensors["output_norm.weight"][0])
    drafter.packed("markov_w2.weight", logits)
    paths = [FOLDER / f"{name}-{quant}.gguf" for name in ("target", "drafter")]
    return target.write(paths[0]), drafter.write(paths[1])


def _model(architecture: str, quant: str, n_layer: int, tokens: dict[str, Any]) -> RandomModel:
    model = RandomModel(architecture, quant, 0, added=ADDED)
    shape_keys(model, n_layer, N_EMBD, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF, 4096)
    model.key("rope.freq_base", 1e6)
    model.keys |= tokens
    for layer in range(n_layer):
        add_layer(model, layer, N_EMBD, N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF)
    return model
