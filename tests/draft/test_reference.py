"""The PyTorch reference sees every option; test_fused_drafter.py compares it with llama.cpp's own
drafter."""

from itertools import combinations
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from drafter_kinds import ALONE, COMMON
from gguf_files import Tensor, changed
from reference import Reference
from synthetic import write_drafter, write_target

torch.set_num_threads(1)  # the products are small


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return write_target(path, n_layer=5)


def random_features(n_rows: int, reference: Reference, seed: int = 0) -> NDArray[np.float32]:
    shape = (n_rows, reference.feature_size)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.slow
def test_every_option_changes_the_draft(target: Path, tmp_path: Path) -> None:
    """Else the comparison with llama.cpp would not show an option that all ignore."""
    drafts: dict[str, torch.Tensor] = {}
    for name, options in (COMMON | ALONE).items():
        path = write_drafter(tmp_path / "drafter.gguf", target, **options)
        reference = Reference(path, target)
        if reference.feature_size == 64:
            reference.inject(0, random_features(40, reference))
            drafts[name] = reference.draft(0, anchor=5)
    for (one, first), (other, second) in combinations(drafts.items(), 2):
        alike = first.shape == second.shape
        assert not alike or (first - second).abs().max() > 0.1, (one, other)
    assert len(drafts) > 20


def test_a_bias_of_the_values_is_one_of_the_output(target: Path, tmp_path: Path) -> None:
    """Attention's weights sum to one, so it passes through the output projection as it is.

    Were it left out of injected rows or of the block, it would not.
    """
    path = write_drafter(tmp_path / "values.gguf", target, biases=("v",))

    def move(tensors: dict[str, Tensor]) -> None:
        for block in ("blk.0.", "blk.1."):
            values, _ = tensors.pop(block + "attn_v.bias")
            heads = values.reshape(2, 16).repeat(2, axis=0).ravel()  # 4 heads share 2
            bias = tensors[block + "attn_output.weight"][0] @ heads
            tensors[block + "attn_output.bias"] = (bias, gguf.GGMLQuantizationType.F32)

    moved = changed(path, tmp_path / "output.gguf", tensors=move)
    drafts = []
    for file in (path, moved):
        reference = Reference(file, target, dtype=torch.float64)
        reference.inject(0, random_features(30, reference))
        drafts.append(reference.draft(0, anchor=5))
    assert (drafts[0] - drafts[1]).abs().max() < 1e-4
