"""The models to unload so that another one fits.

Only plans are compared, nothing is loaded: a model fits beside others if it gets as much of the
machine as it would get alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from dflash_local.errors import InputError
from dflash_local.fit.plan import Plan
from dflash_local.llama.runtime import Device
from dflash_local.server.models.served_model import ServedModel

Planner = Callable[[Sequence[Device]], Plan]
"""The plan of a model on a machine. Raises InputError if it does not fit."""


def fits(plan: Planner, devices: Sequence[Device], *, beside: Sequence[Plan]) -> bool:
    """Whether a model fits beside the models that are loaded by the plans `beside`.

    `devices` have the memory that is left beside these. Raises InputError if the model does not
    fit even alone, so that none is unloaded for it.
    """
    unshared = plan(without(devices, beside))
    try:
        together = plan(_with(devices, beside))
    except InputError:
        return False
    return _value(together) >= _value(unshared)


def first_to_evict(loaded: Iterable[ServedModel]) -> ServedModel:
    """The one used longest ago, and one without requests if there is any."""
    return min(loaded, key=lambda served: (bool(served.running), served.last_used))


def _value(plan: Plan) -> tuple[int, int, int, bool]:
    return plan.n_gpu_layers, -plan.n_cpu_moe, plan.n_ctx, not plan.reads_disk


def without(devices: Sequence[Device], loaded: Sequence[Plan]) -> list[Device]:
    """The machine after all of `loaded` are unloaded."""
    needed: dict[str, int] = {}
    for use in (use for plan in loaded for use in plan.devices):
        needed[use.name] = needed.get(use.name, 0) + use.needed
    shared = sum(needed.get(d.name, 0) for d in devices if d.shares_host)
    return [
        _with_free(d, d.free + needed.get(d.name, 0) + (shared if d.type == "cpu" else 0))
        for d in devices
    ]


def _with(devices: Sequence[Device], loaded: Sequence[Plan]) -> list[Device]:
    """The machine as it is. Weights that a process maps from the file count as free memory, but
    are read for every token."""
    mapped = sum(plan.mapped_bytes for plan in loaded)
    return [_with_free(d, d.free - mapped) if d.type == "cpu" else d for d in devices]


def _with_free(device: Device, free: int) -> Device:
    return replace(device, free=max(0, min(free, device.total)))
