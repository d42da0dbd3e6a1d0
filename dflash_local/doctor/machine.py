"""This machine, and the part of it that its llama.cpp can use."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass

from dflash_local import disk_cache
from dflash_local.cuda import few_rows
from dflash_local.llama import runtime
from dflash_local.llama.gpus import advice, has_nvidia_driver, listed_gpus
from dflash_local.version import version


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
    kernel_advice: str | None = None
    """Advice on our own kernels for its NVIDIA GPU; None if there is nothing to do."""

    @classmethod
    def here(cls) -> Machine:
        devices = runtime.devices()
        gpus = listed_gpus()
        return cls(
            dflash_local=version(),
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
            llama_cpp=runtime.llama_build(),
            features=runtime.system_info(),
            devices=tuple(runtime.backends()),
            gpus=gpus,
            usable_gpus=tuple(d.description for d in devices if d.type in ("gpu", "igpu")),
            driver=has_nvidia_driver() if "NVIDIA" in gpus else None,
            memory_free=max((d.free for d in devices if d.type == "cpu"), default=0),
            disk_free=_disk_free(),
            kernel_advice=few_rows.advice(),
        )

    @property
    def gpu_advice(self) -> str | None:
        """Advice for a GPU that llama.cpp does not use; None if there is nothing to do."""
        return None if self.usable_gpus else advice(self.gpus, self.driver, runtime.INSTALL)


def _disk_free() -> int | None:
    try:
        return shutil.disk_usage(disk_cache.folder()).free
    except OSError:
        return None
