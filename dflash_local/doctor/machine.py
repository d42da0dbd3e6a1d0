"""What this machine is, and what its llama.cpp can use of it."""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash_local import disk_cache
from dflash_local.llama import runtime
from dflash_local.llama.runtime import Device

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAY = ("0x03", "0x12")  # PCI classes of graphics cards and of accelerators
_CMAKE = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_VULKAN=on", "Apple": "-DGGML_METAL=on"}


@dataclass(frozen=True)
class Machine:
    """`gpus` are the makers of the GPUs that the system lists, `usable_gpus` the devices that
    llama.cpp found. `driver`: whether the system has a driver for its NVIDIA GPU; None without one.
    Bytes of memory and disk. Nothing here names the user or the host."""

    dflash_local: str
    python: str
    system: str
    llama_cpp: str
    features: str
    devices: tuple[str, ...]
    gpus: tuple[str, ...]
    usable_gpus: tuple[str, ...]
    driver: bool | None
    memory_free: int
    disk_free: int | None

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        devices = runtime.devices()
        gpus = listed_gpus()
        return cls(
            dflash_local=_version(),
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            llama_cpp=runtime.llama_build(),
            features=runtime.system_info(),
            devices=tuple(runtime.backends()),
            gpus=gpus,
            usable_gpus=tuple(d.description for d in devices if _is_gpu(d)),
            driver=has_nvidia_driver() if "NVIDIA" in gpus else None,
            memory_free=max((d.free for d in devices if d.type == "cpu"), default=0),
            disk_free=_disk_free(),
        )

    @property
    def gpu_advice(self) -> str | None:
        """What to do for a GPU that llama.cpp does not use; None where there is nothing to do."""
        unused = [gpu for gpu in self.gpus if not self.usable_gpus]
        if not unused:
            return None
        if unused[0] == "NVIDIA" and not self.driver:
            return (
                "there is an NVIDIA GPU, but no driver for it here: install the driver, or give "
                "the container access to the GPU (--gpus all)"
            )
        return (
            f"there is an {unused[0]} GPU, but llama-cpp-python is built without it: "
            f'CMAKE_ARGS="{_CMAKE[unused[0]]}" {runtime.INSTALL}'
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    """Whether programs here can reach an NVIDIA driver."""
    if sys.platform == "win32":
        return shutil.which("nvidia-smi") is not None
    return (root / "dev/nvidiactl").exists() and (root / "proc/driver/nvidia").exists()


def _is_gpu(device: Device) -> bool:
    return device.type in ("gpu", "igpu")


def _version() -> str:
    try:
        return version("dflash-local")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0"


def _disk_free() -> int | None:
    try:
        return shutil.disk_usage(disk_cache.folder()).free
    except OSError:
        return None
