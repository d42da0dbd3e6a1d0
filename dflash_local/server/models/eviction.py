"""Whether a model has room beside those that are loaded, and which of them goes if it has not.

Plans are compared, nothing is loaded: a model has room where it gets as much of the machine as it
would get alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from dflash_local.errors import InputError
from dflash_local.fit.plan import Plan
from dflash_local.llama.runtime import Device

Planner = Callable[[Sequence[Device]], Plan]
"""What a model would take of a machine. Raises InputError where it does not fit."""


class Loaded(Protocol):
    """A model that is loaded, for how many requests, and when the last one ended."""

    @property
    def n_running(self) -> int: ...

    @property
    def last_used(self) -> float: ...


L = TypeVar("L", bound=Loaded)


def has_room(plan: Planner, devices: Sequence[Device], loaded: Sequence[Plan]) -> bool:
    """Whether a model that is not loaded has room beside those that are by the plans `loaded`.

    `devices` have the memory that those have left. Raises InputError where the model has no room
    even alone: nobody needs to go for it.
    """
    alone = plan(_without(devices, loaded))
    try:
        beside = plan(_beside(devices, loaded))
    except InputError:
        return False
    return _worth(beside) >= _worth(alone)


def first_to_go(loaded: Iterable[L]) -> L:
    """The one used longest ago, of the idle ones if there are any."""
    return min(loaded, key=lambda model: (model.n_running > 0, model.last_used))


def _worth(plan: Plan) -> tuple[int, int, bool]:
    return plan.n_gpu_layers, plan.n_ctx, not plan.reads_disk


def _without(devices: Sequence[Device], loaded: Sequence[Plan]) -> list[Device]:
    """The machine once all of `loaded` have gone."""
    needed: dict[str, int] = {}
    for use in (use for plan in loaded for use in plan.devices):
        needed[use.name] = needed.get(use.name, 0) + use.needed
    shared = sum(needed.get(d.name, 0) for d in devices if d.shares_host)
    return [
        _with_free(d, d.free + needed.get(d.name, 0) + (shared if d.type == "cpu" else 0))
        for d in devices
    ]


def _beside(devices: Sequence[Device], loaded: Sequence[Plan]) -> list[Device]:
    """The machine as it is. Weights that a process reads from the file count as free, but they are
    read for every token."""
    mapped = sum(plan.mapped_bytes for plan in loaded)
    return [_with_free(d, d.free - mapped) if d.type == "cpu" else d for d in devices]


def _with_free(device: Device, free: int) -> Device:
    return replace(device, free=max(0, min(free, device.total)))
