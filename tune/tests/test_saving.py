"""The files of a tuned drafter hold its weights, and are otherwise like the old ones."""

from pathlib import Path

import pytest
import torch

import hf_drafters
import tiny_coder
from dflash_local.convert import convert
from dflash_local.convert.conversion import SOURCE
from dflash_local.gguf.file import GgufFile
from dflash_local_tune.saving import TUNED, checkpoint_weights, save_checkpoint, save_gguf
from dflash_local_tune.training import is_trained
from dflash_local_tune.weights import read_torch_drafter
from synthetic import write_drafter, write_target


@pytest.mark.slow
def test_a_gguf_file_has_the_new_weights_and_the_old_keys(tmp_path: Path) -> None:
    target, path = tiny_coder.pair()
    old = GgufFile.open(path)
    weights = read_torch_drafter(path, target, dtype=torch.float32).weights
    weights["fc.weight"] = weights["fc.weight"] * 2
    saved = tmp_path / "new.gguf"
    save_gguf(saved, old, weights, GgufFile.open(target))
    new = GgufFile.open(saved)
    assert {name: value for name, value in new.metadata.items() if name != TUNED} == old.metadata
    found = read_torch_drafter(saved, target, dtype=torch.float32).weights
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, atol=2e-3, rtol=1e-2)


def test_a_gguf_file_says_which_repository_the_old_one_came_from(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", n_vocab=320)
    place = tmp_path / "models--some--Drafter" / "snapshots" / "abc"
    place.mkdir(parents=True)
    old = write_drafter(place / "d.gguf", target)
    weights = read_torch_drafter(old, target, dtype=torch.float32).weights
    saved = tmp_path / "new.gguf"
    save_gguf(saved, GgufFile.open(old), weights, GgufFile.open(target))
    assert GgufFile.open(saved).metadata[SOURCE] == "some/Drafter"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", ["plain", "dspark-interleaved", "dflash2", "reduced"])
def test_a_checkpoint_is_converted_to_the_tuned_weights(variant: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", n_vocab=320, n_layer=12)
    old = hf_drafters.write(tmp_path / "old", variant, n_vocab=320)
    weights = checkpoint_weights(old, target)
    trained = set(filter(is_trained, weights))
    for name in trained:
        weights[name] = (weights[name] + 0.25).bfloat16().float()
    new = tmp_path / "new"
    new.mkdir()
    save_checkpoint(new, old, weights, trained, target)
    path = convert(new, target=target, outtype="f32", output=tmp_path / "d.gguf").path
    found = read_torch_drafter(path, target, dtype=torch.float32).weights
    assert trained
    for name in trained:
        torch.testing.assert_close(found[name], weights[name])
