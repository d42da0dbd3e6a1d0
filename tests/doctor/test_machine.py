"""What the system lists as a GPU, and what to do where llama.cpp does not use it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.doctor.machine import Machine, has_nvidia_driver, listed_gpus

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


def test_a_gpu_that_is_not_used_is_told_with_the_way_out() -> None:
    here = replace(Machine.here(), gpus=(), usable_gpus=(), driver=None)
    assert here.gpu_advice is None
    without_driver = replace(here, gpus=("NVIDIA",), driver=False)
    assert "driver" in (without_driver.gpu_advice or "")
    unused = replace(without_driver, driver=True)
    assert "-DGGML_CUDA=on" in (unused.gpu_advice or "")
    assert "-DGGML_VULKAN=on" in (replace(here, gpus=("AMD",)).gpu_advice or "")
    assert replace(unused, usable_gpus=("NVIDIA H200",)).gpu_advice is None
