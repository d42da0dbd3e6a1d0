"""Drafters whose attention has biases, as those for gpt-oss: ours to run, not llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as api
import numpy as np
import pytest
import torch

from dflash_local import load
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.errors import FileError
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.loading import open_drafter
from dflash_local.target.target import Target
from gguf_files import Tensor, changed
from reference import Reference
from synthetic import write_drafter, write_target

ALL = ("q", "k", "v", "output")
F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=3)
    with Target.load(path, n_ctx=64, n_threads=1, tapped_layers=(1,)) as loaded:
        yield loaded


def read(path: Path) -> DrafterSpec:
    return read_drafter(GgufFile.open(path))


@pytest.mark.parametrize("biases", [ALL, ALL[:3], ("output",)])
def test_the_fused_graph_runs_it(biases: tuple[str, ...], target: Target, tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", target.path, biases=biases)
    for file in (path, changed(path, tmp_path / "some.gguf", tensors=_without_those_of_layer_1)):
        spec = read(file)
        assert (spec.family, spec.attention_bias) == ("dflash", True)
        drafter = open_drafter(file, target, spec, n_seq=1, n_ctx=64)
        assert isinstance(drafter, FusedDrafter)
        drafter.close()
    assert not read(write_drafter(path, target.path)).attention_bias


def _without_those_of_layer_1(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("blk.1.") and name.endswith(".bias")]:
        del tensors[name]


def test_llama_cpp_does_not_load_it(target: Target, tmp_path: Path) -> None:
    """As our messages say: should a later version, they are to be changed."""
    path = write_drafter(tmp_path / "drafter.gguf", target.path, biases=ALL)
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    assert not api.llama_model_load_from_file(str(path).encode(), params)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("attn_q.bias", np.zeros(32, np.float32), "has the shape [32], expected [64]"),
        ("attn_k.bias", np.zeros(64, np.float32), "has the shape [64], expected [32]"),
        ("attn_v.bias", np.zeros((2, 32), np.float32), "has the shape [32, 2], expected [32]"),
        ("attn_output.bias", np.zeros(64, np.float16), "has the type F16, expected F32"),
        ("ffn_up.bias", np.zeros(128, np.float32), "does not run (tensors blk.1.ffn_up.bias)"),
    ],
)
def test_a_bias_that_does_not_fit(
    name: str, values: Any, reason: str, target: Target, tmp_path: Path
) -> None:
    good = write_drafter(tmp_path / "good.gguf", target.path, biases=ALL)
    kind = F32 if values.dtype == np.float32 else gguf.GGMLQuantizationType.F16
    bad = changed(
        good,
        tmp_path / "bad.gguf",
        tensors=lambda tensors: tensors.update({f"blk.1.{name}": (values, kind)}),
    )
    with pytest.raises(FileError) as caught:
        load(target.path, bad, quiet=True)
    assert f"blk.1.{name}" in str(caught.value) and reason in str(caught.value)


def test_a_bias_of_the_values_is_one_of_the_output(target: Target, tmp_path: Path) -> None:
    """Attention's weights sum to one, so it passes through the output projection as it is.

    Were it left out of injected rows or of the block, it would not.
    """
    path = write_drafter(tmp_path / "values.gguf", target.path, biases=("v",))

    def move(tensors: dict[str, Tensor]) -> None:
        for block in ("blk.0.", "blk.1."):
            values, _ = tensors.pop(block + "attn_v.bias")
            heads = values.reshape(2, 16).repeat(2, axis=0).ravel()  # 4 heads share 2
            bias = tensors[block + "attn_output.weight"][0] @ heads
            tensors[block + "attn_output.bias"] = (bias, F32)

    moved = changed(path, tmp_path / "output.gguf", tensors=move)
    drafts = []
    for file in (path, moved):
        reference = Reference(file, target.path, dtype=torch.float64)
        rows = np.random.default_rng(0).standard_normal((30, reference.feature_size))
        reference.inject(0, rows.astype(np.float32))
        drafts.append(reference.draft(0, anchor=5))
    assert (drafts[0] - drafts[1]).abs().max() < 1e-4
