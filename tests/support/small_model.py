"""Small models of the tiny target's vocabulary, which draft for it."""

from pathlib import Path
from typing import Any

import tiny_coder
from dflash_local.draft.model_drafter import ModelDrafter
from dflash_local.fit.pairing import read_spec
from dflash_local.gguf.drafter_spec import ModelSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.target import Target
from gguf_files import UINT32, Tensor, changed


def write_small(path: Path, source: Path | None = None, n_layer: int = 5) -> Path:
    """The tiny target, or another one, without its last layers: it guesses some of the tokens."""

    def cut(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("blk.") and int(name.split(".")[1]) >= n_layer:
                del tensors[name]

    keys = {"qwen3.block_count": (n_layer, UINT32, None)}
    return changed(source or tiny_coder.pair()[0], path, keys=keys, tensors=cut)


def model_drafter(target: Target, path: Path | None = None, **options: Any) -> ModelDrafter:
    """A drafter on an open target: a small model, or the target itself, which is always right."""
    path = path or target.path
    spec = read_spec(GgufFile.open(path), GgufFile.open(target.path))
    assert isinstance(spec, ModelSpec)
    n_seq = target.options.n_seq * (2 if spec.is_recurrent else 1)
    wanted = {
        "n_ctx": target.n_ctx + n_seq * spec.block_size,
        "n_seq": n_seq,
        "n_batch": target.options.n_batch,
        "n_threads": 1,
        "kv_type": "q8_0",
        **options,
    }
    return ModelDrafter(path, target, spec, TargetOptions(**wanted))
