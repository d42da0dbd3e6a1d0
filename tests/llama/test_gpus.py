"""The system's list of GPUs, and advice where llama.cpp does not use them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_coder
from dflash_local.llama import runtime
from dflash_local.llama.gpus import advice, cuda_architectures, has_nvidia_driver, listed_gpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's lists of devices")


def device(root: Path, slot: str, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def driver(root: Path) -> None:
    for name in ("dev/nvidiactl", "proc/driver/nvidia/version"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")


def test_gpus_are_found_by_what_they_are(tmp_path: Path) -> None:
    assert listed_gpus(tmp_path) == ()
    device(tmp_path, "0000:00:01.0", "0x10de", "0x040300")  # the sound of a graphics card
    device(tmp_path, "0000:00:02.0", "0x8086", "0x030000")  # shares the host's memory
    assert listed_gpus(tmp_path) == ()
    device(tmp_path, "0000:01:00.0", "0x1002", "0x030000")
    assert listed_gpus(tmp_path) == ("AMD",)
    device(tmp_path, "0000:02:00.0", "0x10de", "0x030200")
    assert listed_gpus(tmp_path) == ("NVIDIA", "AMD")


def test_a_container_may_have_the_driver_alone(tmp_path: Path) -> None:
    assert not has_nvidia_driver(tmp_path)
    driver(tmp_path)
    assert has_nvidia_driver(tmp_path)
    assert listed_gpus(tmp_path) == ("NVIDIA",)


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """Puts a command of that name first on the PATH."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{answer}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_the_driver_may_have_its_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "root"
    nvidia_smi(tmp_path, monkeypatch, "exit 9")  # no driver
    assert not has_nvidia_driver(nowhere) and cuda_architectures() == []
    nvidia_smi(tmp_path, monkeypatch, "printf '9.0\\n12.0\\n9.0\\n'")
    assert has_nvidia_driver(nowhere)
    assert listed_gpus(nowhere) == ("NVIDIA",)
    assert cuda_architectures() == ["120", "90"]


def test_a_gpu_that_is_not_used_is_told_with_the_way_out() -> None:
    assert advice((), None, "pip install it") is None
    assert "no driver" in (advice(("NVIDIA",), False, "pip install it") or "")
    assert '"-DGGML_CUDA=on" pip install it' in (advice(("NVIDIA",), True, "pip install it") or "")
    assert "-DGGML_VULKAN=on" in (advice(("AMD",), None, "pip install it") or "")


@pytest.mark.one_in(2)
@pytest.mark.skipif(
    any(device.type != "cpu" for device in runtime.devices()), reason="llama.cpp has a GPU here"
)
@pytest.mark.parametrize(("layers", "lines"), [(None, 1), (0, 0)])
def test_loads_on_the_cpu_tell_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int | None, lines: int
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 8.9")
    code = (
        "import dflash_local, sys\n"
        "for _ in range(2):\n"
        f"    dflash_local.load(sys.argv[1], n_gpu_layers={layers}, n_ctx=64, say=print).close()\n"
    )
    command = [sys.executable, "-c", code, str(tiny_coder.pair()[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("there is an NVIDIA GPU") == lines
