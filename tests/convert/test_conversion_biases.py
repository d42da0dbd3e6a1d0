"""A drafter whose attention has biases, as those for gpt-oss, from its checkpoint to a draft."""

from pathlib import Path

import numpy as np
import pytest

import hf_drafters
from dflash_local.convert import convert
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from gguf_files import parts
from synthetic import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=8)


def test_it_is_converted_told_of_and_drafts(target: Path, tmp_path: Path) -> None:
    source = hf_drafters.write(tmp_path / "drafter", "gpt-oss", n_vocab=320)
    told: list[str] = []
    result = convert(source, target=target, output=tmp_path / "drafter.gguf", say=told.append)
    assert "the fused graph drafts a block" in result.checks
    (note,) = result.notes
    assert "stock llama.cpp does not load it" in note and note in told
    weights, tensors = hf_drafters.weights("gpt-oss", n_vocab=320), parts(result.path)[1]
    for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
        values, kind = tensors[f"blk.1.attn_{part}.bias"]
        assert kind.name == "F32"
        assert np.array_equal(values, weights[f"layers.1.self_attn.{name}_proj.bias"])
    with Target.load(target, n_ctx=64, n_threads=1, tapped_layers=result.target_layers) as loaded:
        drafter = open_drafter(result.path, loaded, n_seq=1, n_ctx=64)
        assert isinstance(drafter, FusedDrafter)
        (draft,) = drafter.draft([DraftRequest(0, 5, np.ones((3, 192), np.float32), 7)])
        assert len(draft) == 7
