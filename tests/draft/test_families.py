"""A drafter's file decides its family, its inputs, and its faults."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as api
import numpy as np
import pytest

from dflash_local import load
from dflash_local.draft.fused_drafter import FusedDrafter
from dflash_local.errors import FileError, PairError
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.drafter_spec import DrafterSpec
from dflash_local.gguf.file import GgufFile
from dflash_local.loading import open_drafter
from dflash_local.target_model.target import Target
from dflash_local.trial.drafter import try_drafter
from gguf_files import UINT32, Tensor, Value, changed
from synthetic import Markov, Selector, write_drafter, write_target

F16 = gguf.GGMLQuantizationType.F16
F32 = gguf.GGMLQuantizationType.F32
I64 = gguf.GGMLQuantizationType.I64
I32 = gguf.GGMLQuantizationType.I32

FAMILIES: dict[str, Mapping[str, Any]] = {
    "DSpark": {"markov": Markov()},
    "DSpark from the masks": {"markov": Markov(sample_from_anchor=False)},
    "DFlash 2": {"selector": Selector()},
    "reduced vocabulary": {"reduced_vocabulary": 100},
    "reduced vocabulary of DSpark": {"markov": Markov(), "reduced_vocabulary": 100},
    "attention sinks": {"sinks": True},
    "values from keys": {"shared_kv": True},
    "causal": {"extra": {"attention.causal": True}},
    "biases": {"biases": ("q", "k", "v", "output")},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path = write_target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=3)
    with Target.load(path, n_ctx=64, n_threads=1, tapped_layers=(1,)) as loaded:
        yield loaded


def read(path: Path) -> DrafterSpec:
    return read_drafter(GgufFile.open(path))


@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
def test_the_file_decides_the_family(
    options: Mapping[str, Any], target: Target, tmp_path: Path
) -> None:
    path = write_drafter(tmp_path / "drafter.gguf", target.path, **options)
    spec = read(path)
    drafter = open_drafter(path, target, spec, n_seq=1, n_ctx=64)
    assert isinstance(drafter, FusedDrafter)
    kind = "dspark" if "markov" in options else "dflash2" if "selector" in options else "dflash"
    assert spec.family == kind
    assert drafter.block_size == spec.n_draft + 1
    from_anchor = spec.family == "dspark" and options["markov"].sample_from_anchor is not False
    assert spec.n_draft == (8 if from_anchor else 7)
    assert spec.n_vocab_draft == options.get("reduced_vocabulary", 320)
    assert spec.attention_bias == ("biases" in options)
    drafter.close()


def test_llama_cpp_does_not_load_biases(target: Target, tmp_path: Path) -> None:
    """As our messages say: should a later version, they are to be changed."""
    path = write_drafter(tmp_path / "drafter.gguf", target.path, **FAMILIES["biases"])
    params = api.llama_model_default_params()
    params.n_gpu_layers = 0
    assert not api.llama_model_load_from_file(str(path).encode(), params)


def test_a_drafter_of_another_target_is_refused(target: Target, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other.gguf", n_vocab=328)
    path = write_drafter(tmp_path / "drafter.gguf", other, markov=Markov())
    with pytest.raises(FileError, match=r"markov_w1\.weight of the drafter has 328 tokens, the"):
        open_drafter(path, target, n_seq=1, n_ctx=64)
    with pytest.raises(PairError, match="vocabulary size is 328"):
        load(target.path, path, quiet=True)


Change = Callable[[dict[str, Tensor]], Any]
Keys = dict[str, Value | None]


def key(name: str, value: Value | None) -> Keys:
    return {f"dflash.{name}": value}


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray], kind: Any = F32) -> Change:
    return lambda tensors: tensors.update({name: (change(tensors[name][0]), kind)})


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def bias(part: str, *shape: int, kind: Any = F32) -> Change:
    values = np.zeros(shape, np.float16 if kind == F16 else np.float32)
    return lambda tensors: tensors.update({f"blk.1.{part}.bias": (values, kind)})


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("DSpark", without("markov_w2.weight"), "markov_w2.weight is missing"),
        ("DSpark", without("markov_w1.weight"), "no place in a drafter of the family dflash"),
        (
            "DSpark",
            replaced("markov_w1.weight", lambda w: w[:-1]),
            "markov_w1.weight has the shape [8, 319], expected [8, 320]",
        ),
        (
            "DSpark",
            replaced("conf_proj.weight", lambda w: w[:, 1:]),
            "conf_proj.weight has the shape [71, 1], expected [72, 1]",
        ),
        ("DFlash 2", without("selector_successor.weight"), "selector_successor.weight is missing"),
        ("DFlash 2", without("blk.1.ffn_conv_base"), "blk.1.ffn_conv_base is missing"),
        ("DFlash 2", without("selector_hidden.weight"), "another family than the rest, dflash"),
        (
            "DFlash 2",
            replaced("blk.0.attn_conv_base", lambda w: w.astype(np.float16), F16),
            "blk.0.attn_conv_base has the type F16, expected F32",
        ),
        (
            "DFlash 2",
            replaced("blk.0.attn_conv_base", lambda w: w[:, 1:]),
            "[64, 2, 2], expected [64, 3, 2]",
        ),
        (
            "DFlash 2",
            lambda t: t.update({"markov_w1.weight": (np.ones((320, 8), np.float32), F32)}),
            "expected one of them",
        ),
        ("reduced vocabulary", without("output.weight"), "output.weight is missing"),
        ("reduced vocabulary", without("d2t"), "[64, 100], expected [64, 320]"),
        ("reduced vocabulary", replaced("d2t", lambda ids: ids * 5, I64), "expected 0 to 319"),
        ("reduced vocabulary", replaced("d2t", lambda ids: ids - 99, I64), "to token -"),
        ("reduced vocabulary", replaced("d2t", lambda ids: ids // 9, I64), "several rows to one"),
        (
            "reduced vocabulary",
            replaced("d2t", lambda ids: ids.astype(np.int32), I32),
            "d2t has the type I32, expected I64",
        ),
        (
            "attention sinks",
            replaced("blk.0.attn_sinks.weight", lambda w: w[1:]),
            "blk.0.attn_sinks.weight has the shape [3], expected [4]",
        ),
        ("causal", without("blk.0.attn_v.weight"), "blk.0.attn_v.weight is missing"),
        ("biases", bias("attn_q", 32), "attn_q.bias has the shape [32], expected [64]"),
        ("biases", bias("attn_k", 64), "attn_k.bias has the shape [64], expected [32]"),
        ("biases", bias("attn_v", 2, 32), "attn_v.bias has the shape [32, 2], expected [32]"),
        ("biases", bias("attn_output", 64, kind=F16), "attn_output.bias has the type F16, expect"),
        ("biases", bias("ffn_up", 128), "does not run (tensors blk.1.ffn_up.bias)"),
        ("DFlash 2", key("selector_top_k", None), "'dflash.selector_top_k' is missing"),
        ("DFlash 2", key("selector_top_k", (0, UINT32, None)), "is 0, expected 1 to 320"),
        ("DFlash 2", key("selector_top_k", (8, UINT32, None)), "72 values, exceed"),
        ("DFlash 2", key("selector_rank", (9, UINT32, None)), "[8, 320], expected [9, 320]"),
        ("DFlash 2", key("conv_group_size", (0, UINT32, None)), "is 0, expected 1 to 64"),
        ("DFlash 2", key("conv_group_size", (48, UINT32, None)), "is 48, expected a divisor"),
        ("DFlash 2", key("conv_kernel_size", (2, UINT32, None)), "[64, 3, 2], expected [64, 2, 2]"),
        ("DSpark", key("sample_from_anchor", (1, UINT32, None)), "expected bool"),
        ("DSpark", key("block_size", (1, UINT32, None)), "is 1, expected at least 2"),
    ],
)
def test_bad_tensors_and_keys_are_told(
    family: str, change: Change | Keys, reason: str, target: Target, tmp_path: Path
) -> None:
    good = write_drafter(tmp_path / "good.gguf", target.path, **FAMILIES[family])
    how: dict[str, Any] = {"keys" if isinstance(change, dict) else "tensors": change}
    bad = changed(good, tmp_path / "bad.gguf", **how)
    with pytest.raises(FileError) as caught:
        load(target.path, bad, quiet=True)
    told = str(caught.value)
    assert reason in (told.splitlines()[0] if isinstance(change, dict) else told)
    assert str(bad) in told


def test_what_a_drafter_dies_of_is_found_in_the_child(target: Target, tmp_path: Path) -> None:
    """As if our own reader had let it pass."""
    good = write_drafter(tmp_path / "good.gguf", target.path, **FAMILIES["reduced vocabulary"])
    bad = changed(good, tmp_path / "bad.gguf", tensors=replaced("d2t", lambda ids: ids * 999, I64))
    spec = read(good)
    passed = try_drafter(good, spec, target.path).passed
    assert "the fused graph drafts a block" in passed
    with pytest.raises(FileError, match=r"drafting in the fused graph failed") as caught:
        try_drafter(bad, spec, target.path)
    assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    lacking = changed(good, bad, tensors=without("fc.weight"))
    with pytest.raises(FileError, match=r"loading by llama\.cpp failed.*fc\.weight") as caught:
        try_drafter(lacking, spec, target.path)
