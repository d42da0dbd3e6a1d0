"""The code around the kernels, with the CPU in place of a GPU: ggml's graphs in other pieces and
another order give ggml's very bits."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import hybrid
import tiny_coder
from dflash_local.cuda.few_rows import FewRows
from dflash_local.draft.drafter import DraftRequest
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.fit.pairing import check_heads
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from dflash_local.target_model.options import TargetOptions
from dflash_local.target_model.taps import StoredFeatures
from dflash_local.target_model.target import Target
from heads import fused_heads

ROWS = (1, 8, 16, 1, 8, 64, 33)
TARGETS = ("tiny-coder", *dict.fromkeys(hybrid.SNAPSHOTS + hybrid.WITHOUT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def written(folder: Path, name: str) -> Path:
    shipped = tiny_coder.pair()[0]
    path = folder / f"{name}.gguf"
    return shipped if name == "tiny-coder" else hybrid.write_hybrid(path, name, shipped)


def logits(path: Path, few_rows: FewRows | None) -> list[NDArray[np.float32]]:
    options = TargetOptions(n_ctx=256, n_threads=1)
    found = []
    with Target(path, options, few_rows=few_rows) as target:
        for n in ROWS:
            target.clear(0)
            tokens = [5 + 7 * i for i in range(n)]
            target.decode(tokens, list(range(n)), [0] * n, [True] * n)
            found.append(np.stack([target.logits(row) for row in range(n)]))
    return found


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", TARGETS)
def test_logits_have_the_bits_of_ggml(folder: Path, name: str) -> None:
    path = written(folder, name)
    few_rows = FewRows(on_cpu=True)
    found = logits(path, few_rows)
    assert few_rows.native.reason == ""
    counts = few_rows.counts
    assert counts["products"] >= counts["launches"] > 0
    assert counts["repeated"] == 2  # passes of 1 and of 8 rows came twice, with equal graphs
    for ours, expected in zip(found, logits(path, None), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_products_with_experts_are_ours(folder: Path) -> None:
    few_rows = FewRows(on_cpu=True)
    logits(written(folder, "qwen35moe"), few_rows)
    assert few_rows.counts["experts"] > 0


def test_a_layer_takes_four_launches_and_its_attention_is_ours() -> None:
    few_rows, n_layer = FewRows(on_cpu=True), 8
    logits(tiny_coder.pair()[0], few_rows)
    assert few_rows.counts["attentions"] == len(ROWS) * n_layer
    # q with k and v; their output; gate with up; down. And the head.
    assert few_rows.counts["launches"] == len(ROWS) * (4 * n_layer + 1)


def test_a_step_of_heads_takes_six_launches(folder: Path) -> None:
    path = hybrid.write_hybrid(folder / "heads.gguf", "qwen35", tiny_coder.pair()[0], head=0.5)
    few_rows, launches = FewRows(on_cpu=True), [0]
    spec = check_heads(GgufFile.open(path))
    options = TargetOptions(n_ctx=64, tapped_layers=spec.target_layers, heads=True)
    with Target(path, options, few_rows=few_rows) as target:
        drafter = fused_heads(target)
        for n in (1, 2):
            drafter.draft([DraftRequest(0, 9, StoredFeatures(target, []), n)])
            launches.append(few_rows.counts["launches"])
    # Embedding with state; q with k and v; their output; gate with up; down; and the head.
    assert launches[2] - launches[1] == launches[1] + 6


def test_drafts_are_those_of_ggml() -> None:
    def drafted(few_rows: FewRows | None) -> list[int]:
        target_path, drafter_path = tiny_coder.pair()
        layers = read_drafter(GgufFile.open(drafter_path)).target_layers
        options = TargetOptions(n_ctx=256, n_threads=1, tapped_layers=layers)
        with Target(target_path, options, few_rows=few_rows) as target:
            spec = read_drafter(GgufFile.open(drafter_path), n_vocab=target.n_vocab)
            drafter = FusedDrafter(drafter_path, target, spec, n_seq=1, n_ctx=256)
            target.decode([5, 6, 7], [0, 1, 2], [0] * 3, [True] * 3)
            features = StoredFeatures(target, range(target.native.first_stored, 3))
            return drafter.draft([DraftRequest(0, 9, features, n_draft=7)])[0].tokens

    few_rows = FewRows(on_cpu=True)
    assert drafted(few_rows) == drafted(None)
    assert few_rows.counts["launches"] > 0
