"""The kernels that a model needs: compiled, and kept."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import gguf_files
import hybrid
import tiny_coder
from dflash_local.cuda import few_rows, kernels
from dflash_local.cuda.compiler import Compiler, compiler_for, find_compilers
from dflash_local.errors import BackendError
from dflash_local.gguf.file import GgufFile
from dflash_local.llama import native

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
    "IQ3_XXS": 18, "IQ3_S": 21, "F16": 1, "BF16": 30,
}  # fmt: skip

MOST_SPILLED = {120: (56, 36)}
"""Bytes, in kernels of four tiles and in smaller ones: the present spills of these kernels. For
some 128 registers are not enough; more than this is a step back. 48 and 8 elsewhere: three blocks
of one tile share a multiprocessor, and keep an address or two, stored before the loop."""

Shape = kernels.Shape


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    """The one that pip brings with the tests."""
    return find_compilers()[0]


def test_matrices_of_the_shipped_pair() -> None:
    target = kernels.shapes_of(GgufFile.open(tiny_coder.pair()[0]))
    assert target["blk.0.attn_q.weight"] == Shape(TYPES["Q8_0"], 512, 512)
    assert "output_norm.weight" not in target
    assert kernels.pairs_of(target.items()) == [("Q8_0", "Q8_0")]


def test_matrices_of_one_layer_with_inputs_of_one_length_may_share_a_launch() -> None:
    shapes = {
        "blk.0.attn_q.weight": Shape(TYPES["Q4_K"], 512, 512),
        "blk.0.attn_v.weight": Shape(TYPES["Q6_K"], 512, 128),
        "blk.0.ffn_down.weight": Shape(TYPES["Q5_K"], 1536, 512),
        "output.weight": Shape(TYPES["Q8_0"], 512, 999),
    }
    assert kernels.pairs_of(shapes.items()) == [
        ("Q8_0", "Q8_0"),
        ("Q4_K", "Q4_K"),
        ("Q4_K", "Q6_K_U"),
        ("Q5_K", "Q5_K"),
        ("Q6_K_U", "Q6_K_U"),
    ]


def test_units_that_begin_anywhere_have_kernels_of_their_own() -> None:
    assert native.few_rows_operand(TYPES["Q8_0"], 512) == "Q8_0"
    assert native.few_rows_operand(TYPES["Q8_0"], 288) == "Q8_0_U"
    assert native.few_rows_operand(TYPES["Q6_K"], 512) == "Q6_K_U"
    assert native.few_rows_operand(TYPES["Q8_0"], 40) == ""
    assert native.few_rows_operand(TYPES["BF16"], 288) == "BF16"
    assert native.few_rows_operand(TYPES["BF16"], 40) == ""
    assert native.few_rows_operand(34, 512) == ""


def cases(kinds: Iterable[Any], most_used: tuple[Any, ...], daily: tuple[Any, ...]) -> list[Any]:
    """Each kind for 90 and another architecture in turn, those that most people have for all."""
    others = [architecture for architecture in ARCHITECTURES if architecture != 90]
    return [
        pytest.param(kind, architecture, marks=[pytest.mark.slow] if kind not in daily or n else [])
        for i, kind in enumerate(kinds)
        for n, architecture in enumerate((90, *others))
        if kind in most_used or n == 0 or n - 1 == i % 5
    ]


def spilled(log: str) -> list[int]:
    """Bytes of each kernel, in the order of the compiler's log."""
    return [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]


@pytest.mark.parametrize(
    ("name", "architecture"), cases(TYPES, ("Q4_K", "Q6_K", "Q8_0", "MXFP4"), ("Q4_K",))
)
def test_kernels_compile_and_spill_no_more_than_they_did(
    compiler: Compiler, name: str, architecture: int
) -> None:
    for k in (512, 288) if name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL") else (512,):
        operand = native.few_rows_operand(TYPES[name], k)
        _, log = compiler.compile(kernels.source_of((operand, operand)), architecture)
        assert log.count("registers") == len(spilled(log)) > len(kernels.TILES)
        widest, *others = spilled(log)
        most_widest, most_others = MOST_SPILLED.get(architecture, (48, 8))
        assert widest <= most_widest and max(others) <= most_others, f"{operand}: {log}"


HEADS = tuple(kernels.Heads(1, 1, dim, 8, 2) for dim in (64, 80, 96, 112, 128, 256))


@pytest.mark.parametrize(
    ("heads", "architecture"),
    cases([*HEADS, kernels.Heads(8, 8, 128, 8, 2)], (HEADS[4],), ()),
    ids=str,
)
def test_attention_compiles_and_hardly_spills(
    compiler: Compiler, heads: kernels.Heads, architecture: int
) -> None:
    code, log = compiler.compile(kernels.source_of(heads), architecture)
    assert f"attention_{heads.operand}_4".encode() in code
    # Addresses, stored before the loop, most for heads of 64 on sm_120. Sums would be hundreds.
    assert max(spilled(log)) <= 84, log


@pytest.mark.one_in(17)
@pytest.mark.parametrize("name", TYPES)
def test_experts_have_a_kernel_of_each_type(compiler: Compiler, name: str) -> None:
    experts = kernels.Experts(TYPES[name], 512, 64, 8, 2)
    code, log = compiler.compile(kernels.source_of(experts), 90)
    assert f"experts_{experts.operand}".encode() in code
    assert not any(spilled(log))


def test_experts_of_a_mixture(tmp_path: Path) -> None:
    path = hybrid.write_hybrid(tmp_path / "m.gguf", "qwen35moe", tiny_coder.pair()[0])
    file = GgufFile.open(path)
    found = kernels.experts_of(file)
    key = "qwen35moe.expert_used_count"
    of_each_layer = ([file.metadata[key]] * 4, gguf_files.ARRAY, gguf_files.UINT32)
    assert kernels.experts_of(gguf_files.edited(file, keys={key: of_each_layer})) == found
    assert found and all(experts.type == TYPES["Q8_0"] for experts in found)
    assert all(1 <= experts.n_used <= experts.n_experts for experts in found)
    assert kernels.experts_of(GgufFile.open(tiny_coder.pair()[0])) == set()


def test_heads_of_the_shipped_target() -> None:
    file = GgufFile.open(tiny_coder.pair()[0])
    assert kernels.heads_of(file, "f16", "f16") == {kernels.Heads(1, 1, 64, 8, 2)}
    assert kernels.heads_of(file, "q4_0", "q4_0") == set()


@pytest.mark.slow
def test_two_types_in_one_kernel(compiler: Compiler) -> None:
    code, log = compiler.compile(kernels.source_of(("Q4_K", "Q6_K_U")), 90)
    assert b"product_Q4_K_Q6_K_U_4" in code
    assert max(spilled(log)) <= 8


@pytest.mark.slow
def test_code_is_compiled_once(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_LOCAL_CACHE", str(tmp_path))
    quickest = [kernels.Experts(TYPES["F16"], 512, 64, 8, 2)]
    told: list[int] = []

    def cubins(architecture: int) -> list[bytes]:
        return kernels.cubins(quickest, architecture, compiler, lambda: told.append(architecture))

    first = cubins(90)
    assert cubins(90) == first and told == [90]
    assert cubins(80) != first and told == [90, 80]
    for kept in (tmp_path / "kernels").iterdir():
        kept.write_text('"damaged')
    assert cubins(90) == first and told == [90, 80, 90]


def test_a_compiler_error_is_one_line(compiler: Compiler) -> None:
    with pytest.raises(
        BackendError, match=r"^NVRTC \d+\.\d+ cannot compile for sm_90: .*error"
    ) as e:
        compiler.compile("nonsense", 90)
    assert "\n" not in str(e.value)


def test_a_library_that_is_none_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_bytes(b"no library")
    with pytest.raises(BackendError, match="does not load"):
        Compiler(broken)


def test_a_driver_gets_code_of_its_own_major_version_or_older(compiler: Compiler) -> None:
    assert compiler_for(1000 * compiler.major + 20, [90]) is not None
    assert compiler_for(11080, [90]) is None
    assert compiler_for(99000, [90]) is find_compilers()[0]
    assert compiler_for(99000, [20]) is None


def test_without_an_nvidia_gpu_nothing_is_opened_and_nothing_said() -> None:
    assert native.few_rows_gpus() == ([], "llama.cpp sees no NVIDIA GPU")
    said: list[str] = []
    assert few_rows.open_few_rows([GgufFile.open(tiny_coder.pair()[0])], said.append) is None
    assert said == [] and few_rows.advice() is None
