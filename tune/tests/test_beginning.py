"""A drafter before its training fits its target, and says so in files that others can read."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import mini_pair
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local_tune.beginning import mask_token, tapped, write_beginning
from synthetic import write_target
from tune_runs import drafts_change_no_answer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("n_layer", "expected"), [(30, [1, 7, 14, 21, 27]), (8, [1, 2, 3, 4, 5]), (4, [1, 2]), (2, [0])]
)
def test_taps_are_spread_over_the_depth(n_layer: int, expected: list[int]) -> None:
    assert tapped(n_layer) == expected


def test_answers_with_an_untrained_drafter_are_the_plain_ones(tmp_path: Path) -> None:
    target = mini_pair.pair()[0]
    place = write_beginning(tmp_path / "begin", target, block_size=8, n_layer=1)
    spec = read_drafter(GgufFile.open(place))
    assert (spec.block_size, spec.n_layer, spec.n_embd) == (8, 1, 64)
    drafts_change_no_answer(target, place, 8)


def test_a_run_may_begin_with_the_weights_of_another(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf")
    first = write_beginning(tmp_path / "one", target, seed=1)
    second = write_beginning(tmp_path / "two", target, begin=first.parent, block_size=4, seed=2)
    specs = [read_drafter(GgufFile.open(each)) for each in (first, second)]
    assert [each.block_size for each in specs] == [8, 4]
    assert [each.markov_rank for each in specs] == [32, 32]
    weights = "model.safetensors"
    assert (second.parent / weights).read_bytes() == (first.parent / weights).read_bytes()


def test_a_drafter_without_a_markov_head_goes_on_without_one(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf")
    folder = write_beginning(tmp_path / "one", target).parent
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    for name in ("markov_rank", "sample_from_anchor"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    plain = {name: value for name, value in weights.items() if "markov" not in name}
    save_file(plain, folder / "model.safetensors")
    again = write_beginning(tmp_path / "two", target, begin=folder)
    spec = read_drafter(GgufFile.open(again))
    assert (spec.family, spec.n_draft) == ("dflash", 7)


def test_the_mask_token_is_one_that_no_chat_has() -> None:
    target = GgufFile.open(mini_pair.pair()[0])
    token = mask_token(target)
    name = target.metadata["tokenizer.ggml.tokens"][token]
    assert name not in target.metadata["tokenizer.chat_template"]
    assert token != target.metadata["tokenizer.ggml.eos_token_id"]
    assert target.metadata["tokenizer.ggml.token_type"][token] in (3, 5)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf")
    folders = [write_beginning(tmp_path / name, target).parent for name in ("one", "two")]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"]
