"""The GPUs that the system lists, and advice for one that llama.cpp does not use.

`bootstrap.py` reads this file before anything is installed: it needs the standard library alone.
"""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY = ("0x03", "0x12")  # PCI classes of graphics cards and of accelerators
_CMAKE = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_VULKAN=on", "Apple": "-DGGML_METAL=on"}


def listed_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """The makers of the GPUs that the system lists, without those that share the host's memory,
    except Apple's."""
    if sys.platform == "darwin":
        return ("Apple",) if platform.machine() == "arm64" else ()
    found = set()
    for vendor in root.glob("sys/bus/pci/devices/*/vendor"):
        try:
            maker = _VENDORS.get(vendor.read_text().strip())
            kind = vendor.with_name("class").read_text().strip()
        except OSError:
            continue
        if maker and kind.startswith(_DISPLAY):
            found.add(maker)
    if has_nvidia_driver(root):
        found.add("NVIDIA")
    return tuple(sorted(found, reverse=True))


def has_nvidia_driver(root: Path = Path("/")) -> bool:
    """Whether programs here can reach an NVIDIA driver. Windows and its Linux list no devices, but
    have `nvidia-smi`."""
    if (root / "dev/nvidiactl").exists() and (root / "proc/driver/nvidia").exists():
        return True
    return bool(cuda_architectures())


def cuda_architectures() -> list[str]:
    """The NVIDIA GPUs' compute capabilities as CMake names them, such as "90", by `nvidia-smi`."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = re.findall(r"^(\d+)\.(\d)\s*$", done.stdout, re.MULTILINE)
    return sorted({major + minor for major, minor in found})


def advice(gpus: Sequence[str], driver: bool | None, install: str) -> str | None:
    """Advice if llama.cpp uses none of these GPUs; None without any. `install` installs
    llama-cpp-python."""
    if not gpus:
        return None
    if gpus[0] == "NVIDIA" and not driver:
        return (
            "there is an NVIDIA GPU, but no driver for it here: install the driver, or give "
            "the container access to the GPU (--gpus all)"
        )
    return (
        f"there is an {gpus[0]} GPU, but llama-cpp-python is built without it: "
        f'CMAKE_ARGS="{_CMAKE[gpus[0]]}" {install}'
    )
