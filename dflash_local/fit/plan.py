"""Plans how much context and how many layers fit this machine, before anything is loaded.

What the user has set is kept. The rest is chosen so that it fits. What cannot fit is an InputError
with the numbers. A margin on each device covers what `Footprint` cannot know: scratch memory of
kernels, fragmentation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash_local.errors import InputError
from dflash_local.fit.architectures import CELLS, WayBack
from dflash_local.fit.footprint import Footprint, Use, cells, size_text
from dflash_local.fit.options import MAX_OUTPUT_ROWS, LoadOptions, check_whole
from dflash_local.fit.placement import Choice, Devices, tensor_split_of, usable_gpus
from dflash_local.gguf.drafter_spec import AnySpec, HeadsSpec

if TYPE_CHECKING:
    from dflash_local.gguf.file import GgufFile
    from dflash_local.llama.runtime import Device

OWN_HEADS = "the target's own heads"
"""The name of a drafter that has no file of its own."""


@dataclass(frozen=True)
class Plan:
    """Settings to load with, and the bytes that they take."""

    n_ctx: int
    """Tokens of context; llama.cpp's cache has `n_cells`."""
    n_cells: int
    n_gpu_layers: int
    """As llama.cpp counts: the output layer is one. With 0, llama.cpp must get no GPU at all."""
    n_layers: int
    """The most that `n_gpu_layers` can be."""
    n_batch: int
    """The most tokens of a batch."""
    n_seq: int
    kv_type: str
    """Of keys and values, in words."""
    tensor_split: tuple[float, ...] | None
    """With several GPUs: makes llama.cpp place the layers as counted here."""
    gpus: tuple[Use, ...]
    """All GPUs in llama.cpp's order, also those without layers."""
    host: Use
    target_name: str
    target_bytes: int
    drafter_name: str | None
    drafter_bytes: int
    kv_bytes: int
    drafter_kv_bytes: int
    """With a full context. This cache grows in steps."""
    draft_window: int = 0
    """Tokens that the drafter looks back at; 0: the whole context."""
    mapped_bytes: int = 0
    """Weights that the host uses directly in the mapped file. The system can free that memory."""
    state_bytes: int = 0
    """The part of `kv_bytes` that recurrent states take, with their snapshots."""
    way_back: WayBack = CELLS
    n_cpu_moe: int = 0
    """The experts of so many layers, the first ones, are in RAM, wherever the layers are."""
    experts_bytes: int = 0
    """The experts in RAM of layers that are on GPUs."""
    most_rows: int = MAX_OUTPUT_ROWS
    """The most rows of a sequence in a verify pass."""
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Use, ...]:
        return (*self.gpus, self.host)

    @property
    def reads_disk(self) -> bool:
        """Whether decoding may have to read weights from disk again and again."""
        return self.host.needed + self.mapped_bytes > self.host.usable

    def lines(self) -> list[str]:
        """The plan in words, for stderr."""
        used = [use.name for use in self.gpus if use.layers]
        layers = f"{self.n_gpu_layers} of {self.n_layers} layers on {', '.join(used)}"
        if self.experts_bytes:
            layers += f", experts of {size_text(self.experts_bytes)} in RAM"
        target, kv = size_text(self.target_bytes), size_text(self.kv_bytes)
        drafter, drafter_kv = size_text(self.drafter_bytes), size_text(self.drafter_kv_bytes)
        head = next((use.name for use in self.gpus if use.drafter), self.host.name)
        states = ""
        if self.state_bytes:
            rows = self.way_back.rows
            each = {
                "cells": "",
                "replay": f", rejected drafts of up to {rows} tokens are replayed",
                "snapshots": f", {rows} snapshots of each",
            }[self.way_back.kind]
            states = f", {size_text(self.state_bytes)} of it for recurrent states{each}"
        own = f", {drafter}, cache up to {drafter_kv}" if self.drafter_bytes else ""
        window = f" for the last {self.draft_window} tokens" if self.draft_window else ""
        return [
            f"target: {self.target_name}, {target}, {layers if used else f'all on {head}'}",
            f"drafter: {self.drafter_name}{own}{window}, on {head}"
            if self.drafter_name
            else "drafter: none",
            f"context: {self.n_ctx} tokens, {self.kv_type} KV cache of {kv}{states}",
            f"memory: {'; '.join(use.brief for use in self.devices)}",
            *(f"note: {note}" for note in self.notes),
        ]


def make_plan(
    target: GgufFile,
    drafter: GgufFile | None,
    spec: AnySpec | None,
    options: LoadOptions,
    devices: Sequence[Device],
    n_branches: int = 1,
    way_back: WayBack = CELLS,
) -> Plan:
    """The plan for a machine of `devices`, as `runtime.devices()` gives them.

    First, all layers go to GPUs, with the context that the target was trained on, at most 32768. It
    is halved until it fits, down to 4096. If it still does not fit, as many layers as possible go
    to GPUs, with a context of 4096, then 2048. Before that, the experts of as many layers as needed
    go to RAM, with the longest context. `n_branches` are the branches of each sequence, more
    than one for trees. Of the rows of a `way_back` by snapshots there are fewer if they would cost
    context, or layers on GPUs. Raises InputError if nothing fits.
    """
    for name, kv_type in zip(("key_length", "value_length"), options.kv_types, strict=True):
        _check_kv_type(target, kv_type, name)
    check_whole("main_gpu", options.main_gpu, 0, max(0, len(usable_gpus(devices)) - 1))

    def chosen(way: WayBack) -> tuple[Devices, Choice]:
        model = Footprint(target, drafter, spec, options, n_branches, way)
        places = Devices(model, devices, options)
        return places, places.choose(options)

    kept, *more = _fewer(way_back)
    places, choice = chosen(kept)
    for way in more:
        with suppress(InputError):
            richer, found = chosen(way)
            if found == choice:
                places, kept = richer, way
    model, most, (context, count, n_cpu_moe) = places.model, places.most, choice
    host, gpus = places.place(choice)
    n_gpu_layers = options.n_gpu_layers
    experts = places.experts(choice)

    notes = [
        f"override_tensor: no tensor of the target has a name like {pattern}"
        for pattern in options.override_tensor
        if not any(re.search(pattern, name) for name in target.tensors)
    ]
    if n_gpu_layers and not places.gpus:
        notes.append(f"n_gpu_layers is {n_gpu_layers}, but llama.cpp found no GPU")
    if context > model.trained:
        beyond = f"the target was trained on {model.trained} tokens, fewer than {context}"
        notes.append(
            f"{beyond}: what it writes beyond may get poor, with drafts first"
            if options.bends_rope
            else f"{beyond}; rope_scaling 'yarn' may stretch it"
        )
    if count < most and n_gpu_layers is None:
        notes.append(f"{most - count} layers stay on the CPU: the free GPU memory holds no more")
    if experts and not options.cpu_moe and options.n_cpu_moe is None:
        notes.append(
            f"the experts of {len(experts)} layers stay in RAM: the free GPU memory holds no more"
        )
    if kept != way_back:
        notes.append(
            f"at most {kept.rows} tokens are drafted at once, not {way_back.rows}: the memory "
            "holds no more snapshots of the recurrent state"
        )
    plan = Plan(
        n_ctx=context,
        n_cells=cells(context),
        n_gpu_layers=count,
        n_layers=model.n_blocks + 1,
        n_batch=min(options.n_batch, cells(context)),
        n_seq=options.n_seq,
        kv_type=" and ".join(dict.fromkeys(options.kv_types)),
        tensor_split=tensor_split_of([use.layers for use in gpus]),
        gpus=gpus,
        host=host,
        target_name=target.name,
        target_bytes=model.weights,
        drafter_name=drafter_name(drafter, spec),
        drafter_bytes=model.drafter_weights,
        kv_bytes=model.kv(context, range(model.n_blocks)),
        state_bytes=model.states,
        way_back=kept,
        drafter_kv_bytes=model.drafter_kv(context),
        draft_window=options.draft_window or 0,
        mapped_bytes=places.mapped(choice),
        n_cpu_moe=n_cpu_moe,
        experts_bytes=model.blocks(experts).experts,
        most_rows=places.most_rows(choice),
    )
    if plan.reads_disk:
        notes.append("the weights exceed the free memory of the host: decoding may read the disk")
    return replace(plan, notes=tuple(notes))


def drafter_name(drafter: GgufFile | None, spec: AnySpec | None) -> str | None:
    """The name of a drafter: its file, if it has one of its own."""
    if isinstance(spec, HeadsSpec):
        return OWN_HEADS
    return drafter.path.name if drafter else None


def _fewer(way_back: WayBack) -> list[WayBack]:
    """Ways back to try, the least first: by snapshots, with half as many each time."""
    found = [way_back]
    while found[0].by("snapshots") > 1:
        found.insert(0, WayBack("snapshots", max((found[0].rows + 1) // 2 - 1, 1)))
    return found


def _check_kv_type(target: GgufFile, kv_type: str, name: str) -> None:
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kv_type.upper()]][0]
    length = target.get(f"{target.architecture}.attention.{name}") or block
    if length % block:
        raise InputError(
            f"kv_type {kv_type} needs an attention.{name} that is a multiple of {block}, and "
            f"the target's is {length}; use f16"
        )
