"""Whether a model that is still on the hub fits this machine, and which quantisation of it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_local.errors import FileError, InputError
from dflash_local.fit.footprint import size_text
from dflash_local.fit.options import LoadOptions
from dflash_local.fit.pairing import check_target, pooling_of
from dflash_local.fit.plan import Plan, make_plan
from dflash_local.gguf.file import GgufFile

if TYPE_CHECKING:
    from dflash_local.llama.runtime import Device


def check_memory(
    model: GgufFile,
    drafter_bytes: int,
    options: LoadOptions,
    devices: Sequence[Device],
    others: Mapping[str, int],
) -> None:
    """Raise InputError if the model cannot be loaded beside a drafter of so many bytes, with the
    quantisations among `others` (their bytes) that can. Raises FileError for what is no target."""
    if pooling_of(model) is None:
        check_target(model)
    try:
        plan_beside(model, drafter_bytes, options, devices)
    except FileError:
        raise
    except InputError as fault:
        fitting = which_fit(model, drafter_bytes, options, devices, others)
        told = ", ".join(f"{name} ({size_text(others[name])})" for name in fitting)
        advice = f"this would fit: {told}" if fitting else "no other quantisation of it would fit"
        raise InputError(f"{model.path.name} was not fetched: {fault}; {advice}") from None


def which_fit(
    model: GgufFile,
    drafter_bytes: int,
    options: LoadOptions,
    devices: Sequence[Device],
    others: Mapping[str, int],
) -> dict[str, Plan]:
    """The plans of those of `others`, quantisations of the same model, that fit; largest first."""
    found = {}
    for name, size in sorted(others.items(), key=lambda item: -item[1]):
        try:
            found[name] = plan_beside(_scaled(model, size), drafter_bytes, options, devices)
        except FileError:
            raise
        except InputError:
            continue
    return found


def plan_beside(
    model: GgufFile, drafter_bytes: int, options: LoadOptions, devices: Sequence[Device]
) -> Plan:
    """The plan of a model. Its drafter counts with the size of its file, wherever it will lie.
    Raises InputError if it does not fit."""
    left = [replace(each, free=max(0, each.free - drafter_bytes)) for each in devices]
    return make_plan(model, None, None, options, left)


def planned_bytes(model: GgufFile, options: LoadOptions, devices: Sequence[Device]) -> int | None:
    """The memory that the model takes on all devices, without a drafter; None if it does not fit.

    Weights that the host uses in the mapped file are counted."""
    try:
        plan = make_plan(model, None, None, options, devices)
    except InputError:
        return None
    return sum(use.needed for use in plan.devices) + plan.mapped_bytes


def _scaled(model: GgufFile, n_bytes: int) -> GgufFile:
    """The same model in a file of another size, as if each tensor grew or shrank alike."""
    factor = n_bytes / max(1, model.n_bytes)
    tensors = {
        name: replace(tensor, n_bytes=round(tensor.n_bytes * factor))
        for name, tensor in model.tensors.items()
    }
    return replace(model, tensors=tensors, n_bytes=n_bytes)
