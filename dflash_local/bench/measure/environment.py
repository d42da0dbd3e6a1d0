"""The environment of a measurement: versions, devices and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_local.llama import runtime
from dflash_local.version import version

if TYPE_CHECKING:
    from dflash_local.model import Model


@dataclass(frozen=True)
class Environment:
    """A loaded model, and where it runs."""

    version: str
    llama_cpp: str
    devices: tuple[str, ...]
    n_threads: int
    target: str
    drafter: str | None
    n_ctx: int
    kv_type: str
    n_gpu_layers: int
    block_size: int

    @classmethod
    def of(cls, model: Model) -> Environment:
        options = model.target.options
        drafter = model.drafter
        used = [d for d in runtime.devices() if options.n_gpu_layers or d.type == "cpu"]
        return cls(
            version=version(),
            llama_cpp=runtime.llama_build(),
            devices=tuple(dict.fromkeys(device.description for device in used)),
            n_threads=model.target.n_threads,
            target=model.target.path.name,
            drafter=model.plan.drafter_name if model.plan else None,
            n_ctx=model.n_ctx,
            kv_type=" and ".join(dict.fromkeys(options.kv_types)),
            n_gpu_layers=options.n_gpu_layers,
            block_size=drafter.block_size if drafter else 0,
        )
