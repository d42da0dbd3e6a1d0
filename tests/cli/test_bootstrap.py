"""The set-up chooses a build of llama.cpp that runs on the CPU at hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

HASWELL = {"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"}
SKYLAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
SAPPHIRE_RAPIDS = SKYLAKE | {
    *("avx512vbmi", "avx512_vnni", "avx512_bf16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16"),
}


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def every_flag(_: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", HASWELL, []),
        ("x86_64", HASWELL | {"avx_vnni"}, ["AVX_VNNI=ON"]),
        ("x86_64", HASWELL - {"bmi2"}, ["BMI2=OFF"]),
        ("x86_64", {"sse4_2", "avx", "f16c"}, ["AVX2=OFF", "FMA=OFF", "BMI2=OFF"]),
        ("x86_64", SKYLAKE, ["AVX512=ON"]),
        ("x86_64", SKYLAKE - {"avx512vl"}, []),
        ("x86_64", set(), []),
        (
            "x86_64",
            SAPPHIRE_RAPIDS,
            ["AVX512=ON", "AVX512_VBMI=ON", "AVX512_VNNI=ON", "AVX512_BF16=ON"],
        ),
        ("aarch64", {"asimd"}, []),
        ("aarch64", {"asimd", "asimddp"}, ["CPU_ARM_ARCH=armv8.2-a+dotprod"]),
        ("aarch64", {"asimddp", "i8mm"}, ["CPU_ARM_ARCH=armv8.2-a+dotprod+i8mm"]),
        ("arm64", set(), []),
    ],
)
def test_flags_are_what_the_cpu_has(
    bootstrap: ModuleType, machine: str, features: set[str], expected: list[str]
) -> None:
    flags = bootstrap.ggml_flags(machine, features, every_flag)
    assert flags == ["-DGGML_NATIVE=OFF", *(f"-DGGML_{option}" for option in expected)]


def test_flags_leave_out_what_the_compiler_does_not_know(bootstrap: ModuleType) -> None:
    flags = bootstrap.ggml_flags("x86_64", SAPPHIRE_RAPIDS, lambda flag: flag != "-mavx512bf16")
    assert "-DGGML_AVX512_VNNI=ON" in flags
    assert "-DGGML_AVX512_BF16=ON" not in flags


def test_no_flag_turns_amx_on(bootstrap: ModuleType) -> None:
    assert not [f for f in bootstrap.ggml_flags("x86_64", SAPPHIRE_RAPIDS) if "AMX" in f]
