"""The report of a file: the truth about its headers; tests/cli has it in words."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import gguf
import pytest

import tiny_coder
from dflash_local.errors import FileError, PairError
from dflash_local.fit.architectures import (
    RECURRENT_ARCHITECTURES,
    REPLAY_ARCHITECTURES,
    TAPPED_ARCHITECTURES,
)
from dflash_local.fit.inspection import DrafterReport, TargetReport, inspect_drafter, inspect_file
from dflash_local.fit.pairing import check_pair
from dflash_local.gguf.drafter_keys import read_drafter
from dflash_local.gguf.file import GgufFile
from gguf_files import ARRAY, STRING, Value, edited, of_architecture, parts
from synthetic import write_drafter, write_target

TARGET, DRAFTER = tiny_coder.pair()
F16 = gguf.GGMLQuantizationType.F16
Keys = dict[str, Value | None]


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", n_layer=4)


def of_drafter(path: Path) -> DrafterReport:
    report = inspect_file(GgufFile.open(path))
    assert isinstance(report, DrafterReport)
    return report


def test_a_report_repeats_the_spec_that_the_engine_reads(
    small_target: Path, tmp_path: Path
) -> None:
    path = write_drafter(
        tmp_path / "drafter.gguf",
        small_target,
        n_layer=3,
        target_layers=(1, 3),
        sliding_window=24,
        pattern=(True, False, True),
        rope_dimensions=8,
    )
    report, spec = of_drafter(path), read_drafter(GgufFile.open(path))
    told, known = report.as_dict(), json.loads(json.dumps(asdict(spec)))
    same = told.keys() & known.keys() - {"sliding_layers"}
    assert {name: told[name] for name in same} == {name: known[name] for name in same}
    assert told["sliding_layers"] == [0, 2]
    assert told["taps_after"] == [0, 2]
    assert told["rope"]["n_dims"] == 8


def test_biases_keep_llama_cpp_from_the_file(small_target: Path, tmp_path: Path) -> None:
    plain = of_drafter(write_drafter(tmp_path / "plain.gguf", small_target))
    biased = of_drafter(write_drafter(tmp_path / "b.gguf", small_target, biases=("q", "output")))
    assert plain.llama_cpp_loads and not biased.llama_cpp_loads


def test_a_vocabulary_may_come_from_the_target(small_target: Path, tmp_path: Path) -> None:
    whole = write_drafter(tmp_path / "whole.gguf", small_target)
    tokenizer = {name: None for name in parts(whole)[0] if name.startswith("tokenizer.")}
    tokenizer.pop("tokenizer.ggml.mask_token_id")
    bare = edited(GgufFile.open(whole), keys=tokenizer)
    with pytest.raises(FileError, match="n_vocab"):
        inspect_file(bare)
    target = GgufFile.open(small_target)
    report = inspect_drafter(bare, target=target)
    assert (report.spec.n_vocab, report.mask_token) == (target.n_vocab, "<|mask|>")
    assert report.file.tokenizer is None
    check_pair(target, bare)


@pytest.mark.parametrize("name", ["qwen3", "gemma3n", "qwen35", "nemotron_h", "mamba", "deepseek4"])
def test_what_llama_cpp_lets_a_drafter_do(name: str) -> None:
    target = of_architecture(GgufFile.open(TARGET), name)
    report = inspect_file(target)
    assert isinstance(report, TargetReport)
    assert report.offers_taps == (name in TAPPED_ARCHITECTURES)
    assert report.is_recurrent == (name in RECURRENT_ARCHITECTURES)
    assert (report.way_back == "cells") == (not report.is_recurrent)
    assert (report.way_back == "replay") == (name in REPLAY_ARCHITECTURES)
    assert report.rolls_back == (name not in ("mamba", "deepseek4"))
    if report.takes_drafters:
        check_pair(target, GgufFile.open(DRAFTER))
    else:
        with pytest.raises(PairError):
            check_pair(target, GgufFile.open(DRAFTER))


def test_provenance_is_what_the_file_says() -> None:
    keys: Keys = {
        "dflash_local.source": ("z-lab/Some-DFlash", STRING, None),
        "general.source.repo_url": ("https://example.org/z-lab/Some-DFlash", STRING, None),
        "general.tags": (["a", "b"], ARRAY, STRING),
    }
    found = inspect_file(edited(GgufFile.open(DRAFTER), keys=keys)).file.provenance
    assert found["dflash_local.source"] == "z-lab/Some-DFlash"
    assert found["general.source.repo_url"].endswith("Some-DFlash")
    assert found["general.tags"] == ["a", "b"]
    assert not [key for key in found if key.startswith(("tokenizer.", "dflash."))]
    assert "general.architecture" not in found and "general.file_type" not in found


def test_llama_cpp_stays_out() -> None:
    code = (
        "import sys\n"
        "from dflash_local.fit.pairing import check_pair\n"
        "from dflash_local.fit.inspection import inspect_file\n"
        "from dflash_local.gguf.file import GgufFile\n"
        f"target, drafter = map(GgufFile.open, ({str(TARGET)!r}, {str(DRAFTER)!r}))\n"
        "inspect_file(target), inspect_file(drafter), check_pair(target, drafter)\n"
        "print([name for name in sys.modules if name.startswith('llama_cpp')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
