"""Which models have room beside each other, and which of them goes: no model is loaded for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from dflash_local.errors import InputError
from dflash_local.fit.footprint import Use
from dflash_local.fit.plan import Plan
from dflash_local.llama.runtime import Device
from dflash_local.server.models.eviction import Planner, first_to_evict, fits

GIB = 1 << 30


@dataclass
class Host:
    name: str
    n_running: int
    last_used: float


def machine(*, gpu: float, host: float = 64, gpu_total: float = 24) -> list[Device]:
    """One with so many GiB free."""
    return [
        Device("CUDA0", "a GPU", "gpu", int(gpu * GIB), int(gpu_total * GIB)),
        Device("CPU", "a CPU", "cpu", int(host * GIB), 64 * GIB),
    ]


def taken(devices: Sequence[Device], size: float, *, on_gpu: bool, mapped: float = 0) -> Plan:
    """A plan for so many GiB on one of two devices."""
    gpu, host = (
        Use(d.name, d.free, d.total, d.free, int(on_gpu), kv=int(size * GIB) if here else 0)
        for d, here in zip(devices, (on_gpu, not on_gpu), strict=True)
    )
    return Plan(
        n_ctx=8192,
        n_cells=8192,
        n_gpu_layers=32 if on_gpu else 0,
        n_layers=32,
        n_batch=512,
        n_seq=4,
        kv_type="f16",
        tensor_split=None,
        gpus=(gpu,),
        host=host,
        target_name="model.gguf",
        target_bytes=int(size * GIB),
        drafter_name=None,
        drafter_bytes=0,
        kv_bytes=int(size * GIB),
        drafter_kv_bytes=0,
        mapped_bytes=int(mapped * GIB),
    )


def wants(size: float) -> Planner:
    """A model of so many GiB: on the GPU where it fits, else on the host, else nowhere."""

    def plan(devices: Sequence[Device]) -> Plan:
        for device, on_gpu in zip(devices, (True, False), strict=True):
            if size * GIB <= device.free:
                return taken(devices, size, on_gpu=on_gpu)
        raise InputError("the models do not fit")

    return plan


def reads(size: float) -> Planner:
    """A model of so many GiB that the host reads straight from the file."""
    return lambda devices: taken(devices, 0, on_gpu=False, mapped=size)


def loaded(*sizes: float) -> list[Plan]:
    return [taken(machine(gpu=24), size, on_gpu=True) for size in sizes]


def test_alone_there_is_room() -> None:
    assert fits(wants(20), machine(gpu=24), beside=[])


def test_beside_a_small_one_there_is_room() -> None:
    assert fits(wants(10), machine(gpu=12), beside=loaded(12))


def test_a_model_that_would_be_pushed_off_the_gpu_has_none() -> None:
    assert not fits(wants(14), machine(gpu=12), beside=loaded(12))


def test_a_model_that_would_not_fit_at_all_has_none() -> None:
    assert not fits(wants(14), machine(gpu=12, host=2), beside=loaded(12))


def test_nobody_needs_to_go_for_one_that_gets_no_more_alone() -> None:
    assert fits(wants(30), machine(gpu=12), beside=loaded(12))


def test_nobody_goes_for_one_that_does_not_fit_even_alone() -> None:
    with pytest.raises(InputError, match="do not fit"):
        fits(wants(100), machine(gpu=12), beside=loaded(12))


def test_weights_that_others_read_from_their_files_take_room() -> None:
    others = [taken(machine(gpu=24), 0, on_gpu=False, mapped=40)]
    assert fits(reads(20), machine(gpu=24, host=62), beside=others)
    assert not fits(reads(30), machine(gpu=24, host=62), beside=others)
    assert fits(reads(30), machine(gpu=24, host=62), beside=[])


def test_what_a_gpu_gives_back_is_the_hosts_where_they_share_it() -> None:
    """An Apple machine: 16 GiB for both, of which a model has 8."""
    gpu = Device("MTL0", "a GPU", "gpu", 4 * GIB, 12 * GIB, shares_host=True)
    devices = [gpu, Device("CPU", "a CPU", "cpu", 4 * GIB, 16 * GIB)]
    others = [taken(devices, 8, on_gpu=True)]

    def plan(machine: Sequence[Device]) -> Plan:
        fits = all(device.free >= 10 * GIB for device in machine)
        return taken(machine, 10, on_gpu=fits)

    assert not fits(plan, devices, beside=others)


def test_the_one_used_longest_ago_goes_first() -> None:
    hosts = [Host("a", 0, 3.0), Host("b", 0, 1.0), Host("c", 0, 2.0)]
    assert first_to_evict(hosts).name == "b"


def test_idle_ones_go_before_those_at_work() -> None:
    hosts = [Host("a", 2, 1.0), Host("b", 0, 9.0), Host("c", 1, 0.0)]
    assert first_to_evict(hosts).name == "b"
    assert first_to_evict([hosts[0], hosts[2]]).name == "c"
