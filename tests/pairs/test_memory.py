"""The fit is known from a model's header alone."""

from pathlib import Path

import pytest

import tiny_coder
from dflash_local.errors import FileError, InputError
from dflash_local.fit.options import LoadOptions
from dflash_local.gguf.file import GgufFile
from dflash_local.llama.runtime import Device
from dflash_local.pairs.inventory import listed
from dflash_local.pairs.memory import check_memory, planned_bytes, which_fit
from embedding_models import write_bert
from lab.shapes.writer import write_pair
from mini_shapes import EXPERTS

GIB = 1 << 30
MIB = 1 << 20


def machine(free: int) -> list[Device]:
    return [Device("CPU", "", "cpu", free, free)]


@pytest.fixture(scope="module")
def target() -> GgufFile:
    return GgufFile.open(tiny_coder.pair()[0])


def test_the_quantisations_that_fit_are_named(target: GgufFile) -> None:
    options = LoadOptions(n_ctx=2048)
    assert planned_bytes(target, options, machine(32 * GIB))
    scarce = next(
        mib for mib in range(1024, 0, -2) if not planned_bytes(target, options, machine(mib * MIB))
    )
    others = {"BF16": 2 * target.n_bytes, "Q4_K_M": target.n_bytes // 2, "Q2_K": 8 * MIB}
    check_memory(target, 0, options, machine(32 * GIB), others)
    with pytest.raises(InputError, match="was not fetched") as refusal:
        check_memory(target, 0, options, machine(scarce * MIB), others)
    line = str(refusal.value)
    assert "this would fit: Q4_K_M (14 MiB), Q2_K (8 MiB)" in line and "BF16" not in line


def test_the_drafter_counts(target: GgufFile) -> None:
    options = LoadOptions(n_ctx=2048)
    room = machine(GIB)
    check_memory(target, 0, options, room, {})
    with pytest.raises(InputError, match="no other quantisation of it would fit"):
        check_memory(target, GIB, options, room, {})


def test_what_is_no_target_is_refused() -> None:
    with pytest.raises(FileError, match="drafter"):
        drafter = GgufFile.open(tiny_coder.pair()[1])
        check_memory(drafter, 0, LoadOptions(), machine(GIB), {})


def test_the_list_says_which_mixtures_fit_with_experts_in_ram() -> None:
    devices = [*machine(64 * GIB), Device("CUDA0", "", "gpu", 16 * GIB, 16 * GIB)]
    found = {row.entry.name: row.fits for row in listed(devices)}
    assert found["qwen3-coder-30b-a3b"] == "experts" and found["qwen3-8b"] == "gpu"
    assert {row.fits for row in listed(machine(64 * GIB))} <= {"cpu", "no", None}


def test_a_plan_tells_the_experts_in_ram(tmp_path: Path) -> None:
    path, _ = write_pair(EXPERTS, "Q8_0", tmp_path)
    file, options = GgufFile.open(path), LoadOptions(n_ctx=2048)

    def in_ram(mib: int) -> int:
        gpu = Device("CUDA0", "", "gpu", mib * MIB, 8 * GIB)
        fitting = which_fit(file, 0, options, [*machine(4 * GIB), gpu], {"Q8_0": file.n_bytes})
        return fitting["Q8_0"].experts_bytes

    found = [in_ram(mib) for mib in range(700, 520, -4)]
    assert found[0] == 0 < max(found) < file.n_bytes


def test_an_embedding_model_may_be_fetched(tmp_path: Path) -> None:
    encoder = GgufFile.open(write_bert(tmp_path / "bert.gguf"))
    check_memory(encoder, 0, LoadOptions(), machine(GIB), {})
    with pytest.raises(InputError, match="was not fetched"):
        check_memory(encoder, 0, LoadOptions(), machine(MIB), {})
