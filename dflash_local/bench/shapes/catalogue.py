"""Shapes of real pairs, to measure a machine before anything is downloaded.

Dimensions of targets are those of their published configs. Drafters: 5 layers, blocks of 16 and 5
taps, 8 layers for the mixtures of experts and blocks of 10 for Llama 3.1 (arXiv 2602.06036, section
5), each with the heads and the feed-forward width of its target, as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dflash_local.bench.shapes.file import DEFAULT_DRAFTER_QUANT, drafter_file, target_file
from dflash_local.bench.shapes.shape import DrafterShape, Experts, Shape
from dflash_local.bench.shapes.writer import write_files
from dflash_local.errors import InputError

__all__ = ["SHAPES", "DrafterShape", "Experts", "Shape", "find_shape", "write_pair"]

_QWEN3_VOCAB = 151936

_QWEN3_8B = Shape(
    name="qwen3-8b",
    architecture="qwen3",
    n_layer=36,
    n_embd=4096,
    n_ff=12288,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
    n_vocab=_QWEN3_VOCAB,
    drafter=DrafterShape(5, 12288, 32, 8, 128),
)
_QWEN3_4B = Shape(
    name="qwen3-4b",
    architecture="qwen3",
    n_layer=36,
    n_embd=2560,
    n_ff=9728,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
    n_vocab=_QWEN3_VOCAB,
    drafter=DrafterShape(5, 9728, 32, 8, 128),
    tied=True,
)
# no drafter is published for the model without "Coder"; that one's serves, as the sizes are equal
_QWEN3_30B_A3B = Shape(
    name="qwen3-30b-a3b",
    architecture="qwen3moe",
    n_layer=48,
    n_embd=2048,
    n_ff=6144,
    n_head=32,
    n_head_kv=4,
    head_dim=128,
    n_vocab=_QWEN3_VOCAB,
    drafter=DrafterShape(8, 6144, 32, 4, 128),
    experts=Experts(128, 8, 768),
)
_QWEN3_CODER_30B_A3B = Shape(
    name="qwen3-coder-30b-a3b",
    architecture="qwen3moe",
    n_layer=48,
    n_embd=2048,
    n_ff=6144,
    n_head=32,
    n_head_kv=4,
    head_dim=128,
    n_vocab=_QWEN3_VOCAB,
    drafter=DrafterShape(8, 6144, 32, 4, 128, rope_base=1e7),
    context_length=262144,
    rope_base=1e7,
    experts=Experts(128, 8, 768),
)
_LLAMA_3_1_8B = Shape(
    name="llama-3.1-8b",
    architecture="llama",
    n_layer=32,
    n_embd=4096,
    n_ff=14336,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
    n_vocab=128256,
    drafter=DrafterShape(5, 14336, 32, 8, 128, block_size=10, rope_base=5e5),
    context_length=131072,
    rope_base=5e5,
    rms_eps=1e-5,
    pre_tokenizer="llama-bpe",
)
# The published drafter also has biases, which cost nothing and which llama.cpp does not load. Its
# feed-forward width follows from the size of the checkpoint, 1.46 GiB in BF16.
_GPT_OSS_20B = Shape(
    name="gpt-oss-20b",
    architecture="gpt-oss",
    n_layer=24,
    n_embd=2880,
    n_ff=2880,
    n_head=64,
    n_head_kv=8,
    head_dim=64,
    n_vocab=201088,
    drafter=DrafterShape(8, 7680, 64, 8, 64, block_size=8, rope_base=1.5e5),
    context_length=131072,
    rope_base=1.5e5,
    rms_eps=1e-5,
    experts=Experts(32, 4, 2880),
    pre_tokenizer="gpt-4o",
)

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _QWEN3_8B,
        _QWEN3_4B,
        _QWEN3_30B_A3B,
        _QWEN3_CODER_30B_A3B,
        _LLAMA_3_1_8B,
        _GPT_OSS_20B,
    )
}


def find_shape(name: str) -> Shape:
    """The shape of that name. Raises InputError, listing the names that there are."""
    if name not in SHAPES:
        raise InputError(f"no shape {name!r}; expected one of {', '.join(SHAPES)}")
    return SHAPES[name]


def write_pair(
    shape: str | Shape,
    quant: str,
    folder: Path,
    *,
    drafter_quant: str = DEFAULT_DRAFTER_QUANT,
    n_layer: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, Path]:
    """Target and drafter of that shape as GGUF files with random weights in `folder`.

    `quant` is one of `shape_files.QUANTS`; `n_layer` makes a target of fewer or more layers. A file
    that is there already, complete, is left as it is. `progress(done, total)` is told bytes of both
    files together. Files appear under their names when they are complete, and nothing is left of
    those that fail. Raises InputError for an unknown shape or quant, for a folder that cannot be
    written to, and, before anything is written, for one without enough room.
    """
    if isinstance(shape, str):
        shape = find_shape(shape)
    shape = shape.with_layers(n_layer)
    files = (target_file(shape, quant), drafter_file(shape, drafter_quant))
    target, drafter = write_files(folder, files, progress)
    return target, drafter
