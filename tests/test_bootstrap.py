"""The set-up chooses a build of llama.cpp that runs on the CPU at hand, and uses the GPU."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

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


def choice(bootstrap: ModuleType, gpus: str, **facts: object) -> tuple[str, str, str]:
    usual = {"driver": True, "buildable": {"cuda", "vulkan"}, "built": None}
    found = bootstrap.choose_gpu(tuple(gpus.split()), **{**usual, **facts})
    return found.gpu, found.line, found.question


@pytest.mark.parametrize(
    ("gpus", "facts", "expected"),
    [
        ("", {}, "none"),
        ("NVIDIA", {}, "cuda"),
        ("NVIDIA", {"buildable": {"vulkan"}}, "vulkan"),
        ("NVIDIA AMD", {}, "cuda"),
        ("AMD", {}, "vulkan"),
        ("Apple", {"buildable": {"metal"}}, "metal"),
        ("AMD", {"buildable": {"cuda"}}, "none"),
        ("NVIDIA", {"driver": False}, "none"),
        ("NVIDIA", {"built": "vulkan"}, "vulkan"),  # what works is kept
        ("NVIDIA", {"built": "none"}, "none"),
        ("NVIDIA", {"asked": "none", "built": "cuda"}, "none"),
        ("", {"asked": "vulkan"}, "vulkan"),
        ("", {"asked": "metal", "built": "metal"}, "metal"),
    ],
)
def test_the_gpu_that_is_here_is_built_for(
    bootstrap: ModuleType, gpus: str, facts: dict[str, object], expected: str
) -> None:
    assert choice(bootstrap, gpus, **facts)[0] == expected


def test_nothing_is_said_where_there_is_nothing_to_choose(bootstrap: ModuleType) -> None:
    assert choice(bootstrap, "") == ("none", "", "")
    assert choice(bootstrap, "NVIDIA", built="cuda") == ("cuda", "", "")
    assert choice(bootstrap, "NVIDIA", built="none", refused=True) == ("none", "", "")


def test_what_is_missing_is_told_with_the_way_back(bootstrap: ModuleType) -> None:
    _, line, question = choice(bootstrap, "NVIDIA", buildable=set())
    assert "nvcc" in line and "bootstrap.py --gpu cuda" in line and "nvcc" in question
    _, line, question = choice(bootstrap, "NVIDIA", driver=False)
    assert "no driver" in line and "bootstrap.py --gpu cuda" in line and not question
    _, line, question = choice(bootstrap, "AMD", built="none")
    assert "is for the CPU, and kept" in line and "--gpu vulkan" in line and "again" in question


def test_a_build_for_cuda_is_for_the_gpus_here_alone(bootstrap: ModuleType) -> None:
    assert bootstrap.gpu_flags("cuda", ["89", "90"]) == [
        "-DGGML_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=89;90",
    ]
    assert bootstrap.gpu_flags("vulkan", []) == ["-DGGML_VULKAN=ON"]


@pytest.mark.skipif(os.name == "nt", reason="the stand-ins are shell scripts")
def test_driver_and_compiler_are_found_by_their_commands(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia-smi", "nvcc"):
        (tmp_path / name).write_text("#!/bin/sh\necho 8.6\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = bootstrap.gpu_facts()
    assert "NVIDIA" in found.listed_gpus() and found.has_nvidia_driver()
    assert found.cuda_architectures() == ["86"]
    assert "cuda" in bootstrap.buildable_gpus()


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal can be built there")
def test_a_backend_that_cannot_be_built_is_refused_and_nothing_is_changed() -> None:
    command = [sys.executable, ROOT / "bootstrap.py", "--gpu", "metal"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "setup: --gpu metal needs a Mac with an Apple chip\n"


@pytest.mark.skipif(os.name == "nt", reason="has no pseudo-terminals")
@pytest.mark.parametrize(("typed", "expected"), [("y", "cuda"), ("", "cuda"), ("n", "none")])
def test_at_a_terminal_it_asks(typed: str, expected: str) -> None:
    import pty

    code = (
        "import bootstrap\n"
        "found = bootstrap.choose_gpu(('NVIDIA',), True, {'cuda'}, None)\n"
        "print(bootstrap.settled(found))\n"
    )
    ours, theirs = pty.openpty()
    asking = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, cwd=ROOT
    )
    os.close(theirs)
    os.write(ours, f"{typed}\n".encode())
    answer, _ = asking.communicate()
    os.close(ours)
    assert answer.decode().strip() == expected


def test_without_a_terminal_it_says_what_it_took(
    bootstrap: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    found = bootstrap.choose_gpu(("NVIDIA",), True, {"cuda"}, None)
    assert bootstrap.settled(found) == "cuda"
    assert "built for it, with cuda" in capsys.readouterr().err


def test_a_second_set_up_is_none(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytecode that the build leaves beside its sources is no change; a source file is one."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "tools" / "__pycache__").mkdir(parents=True)
    (tmp_path / "tune").mkdir()
    projects = ("pyproject.toml", "tune/pyproject.toml")
    for name in ("bootstrap.py", *projects, "CMakeLists.txt", "tools/build_backend.py"):
        (tmp_path / name).touch()
    before = bootstrap.fingerprint()
    (tmp_path / "tools" / "__pycache__" / "build_backend.cpython-312.pyc").touch()
    assert bootstrap.fingerprint() == before
    (tmp_path / "tools" / "build_backend.py").write_text("pass\n")
    assert bootstrap.fingerprint() != before
