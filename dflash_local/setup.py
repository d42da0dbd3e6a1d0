"""The way to load a pair on a machine, and the next one to try if that fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_local.draft.shape import DraftShape
from dflash_local.errors import InputError
from dflash_local.fit.architectures import CELLS, SNAPSHOT_ARCHITECTURES, WayBack
from dflash_local.fit.options import (
    COPY_SNAPSHOTS,
    MAX_OUTPUT_ROWS,
    SNAPSHOT_ROWS,
    ContextOptions,
    LoadOptions,
)
from dflash_local.fit.overrides import experts_of
from dflash_local.fit.placement import named_devices, usable_gpus
from dflash_local.fit.plan import Plan, make_plan
from dflash_local.gguf.drafter_spec import AssistantSpec, DrafterSpec, HeadsSpec, ModelSpec
from dflash_local.gguf.file import file_key
from dflash_local.llama import runtime
from dflash_local.llama.runtime import Device
from dflash_local.llama.workers import remote_devices
from dflash_local.pair import Pair, usual_shape
from dflash_local.pairs.defaults import draft_window_of
from dflash_local.target_model.cells import branches_of_each
from dflash_local.target_model.options import TargetOptions, reads_in_place
from dflash_local.target_model.replay import can_replay

_NO_GAIN = (
    "drafting is off: it could not pay here even if every draft were accepted, so no snapshots of "
    "the recurrent state are kept; a draft width set at the load keeps them, and `dflash-local "
    "calibrate` measures again"
)
_NO_WAY_BACK = (
    "drafting is off: the target has recurrent layers, whose state cannot be taken back here"
)
_NO_WIDTH = (
    "drafting is off: the draft width was 0 at the load, so no further recurrent states are kept"
)
_NO_REPLAY = (
    "this device cannot replay the recurrent state, so rejected drafts are taken back another way:"
)
NO_HEADS = "the target's own heads are not used:"
_NO_ROOM_FOR_HEADS = "the memory does not hold them, too"
_FEWER_SNAPSHOTS = (
    "llama.cpp's graph has room for {} snapshots of this target's recurrent state; planned again:"
)


def split_by_layers_because(options: LoadOptions, devices: Sequence[Device]) -> str | None:
    """The reason for whole layers on the GPUs, although another way was asked for; else None.

    With tensors split, `llama_context::set_sampler` refuses what runs on the device, our way into
    the graph. By rows, `make_gpu_buft_list` refuses devices whose backend has no split buffers, as
    CUDA's has none any more.
    """
    why = {
        "tensor": "llama.cpp lets nobody into its graph with tensors split, and so gives no drafts",
        "row": "this llama.cpp cannot split rows on these GPUs",
    }.get(options.split_mode)
    if why is None or options.n_gpu_layers == 0 or not usable_gpus(devices):
        return None
    return f"split_mode is 'layer', not {options.split_mode!r}: {why}"


def machine_devices(options: LoadOptions) -> list[Device]:
    """The devices that a load with these options may use. Raises WorkerLostError."""
    return named_devices([*remote_devices(options.rpc), *runtime.devices()], options.device)


@dataclass(frozen=True)
class Setup:
    """All that follows for a load of these files with these options on these devices.

    `named` are the files as they were named; `pair` what is loaded of them. What a trial finds
    makes the next setup: that rows cannot be replayed, or how many snapshots llama.cpp can keep.
    """

    named: Pair
    options: LoadOptions
    devices: Sequence[Device]
    may_replay: bool = True
    most_snapshots: int = MAX_OUTPUT_ROWS
    finding: str = ""
    """One line on what the setup before this one came to."""

    @property
    def pair(self) -> Pair:
        """The files as they are loaded: without a drafter where nothing can be drafted, or where
        requests decode plainly and further recurrent states would only take memory and time."""
        return self._choice[0]

    @property
    def plan(self) -> Plan:
        """Raises InputError for what does not fit the machine."""
        return self._choice[1]

    @property
    def plain_because(self) -> str | None:
        """One line on why nothing is drafted, although drafts were asked for; else None."""
        return self._choice[2]

    @cached_property
    def shape(self) -> DraftShape:
        """The draft shape of requests that name none: copies alone are chains."""
        copies = self.options.draft_shape is not None and self._may_copy(self.named)
        if self.named.draft is None and not copies:
            return "chain"
        return usual_shape(self.devices, self.options)

    @property
    def may_copy(self) -> bool:
        """Whether what a text repeats is drafted: with a drafter, where it was asked for, and
        elsewhere if it slows no step down and may be of use."""
        return self._may_copy(self.pair)

    @property
    def target_options(self) -> TargetOptions:
        """The options by which the target is opened."""
        pair, plan = self.pair, self.plan
        shared = {field.name: getattr(self.options, field.name) for field in fields(ContextOptions)}
        names = ("n_ctx", "n_batch", "n_gpu_layers", "n_cpu_moe", "tensor_split", "way_back")
        planned = {
            **{name: getattr(plan, name) for name in names},
            "tapped_layers": pair.spec.target_layers if pair.spec else (),
            "n_branches": self._n_branches(plan.n_batch),
            "heads": isinstance(pair.spec, HeadsSpec),
            "in_place": reads_in_place(pair.target),
        }
        return TargetOptions(**shared | planned)

    @property
    def model_drafter_options(self) -> TargetOptions:
        """The options of a drafter that is a language model: whole, where the target's logits are,
        with a block of cells more for each sequence."""
        plan, spec = self.plan, self.pair.spec
        assert isinstance(spec, ModelSpec)
        options = self.target_options.for_drafter(is_recurrent=spec.is_recurrent)
        own = [gpu.name for gpu in usable_gpus(self.devices) if not gpu.is_remote]
        used = [own.index(gpu.name) for gpu in plan.gpus if gpu.drafter]
        return replace(
            options,
            n_ctx=plan.n_ctx + plan.n_seq * spec.block_size,
            n_gpu_layers=-1 if used else 0,
            n_cpu_moe=0,
            tensor_split=None,
            split_mode="none",
            main_gpu=used[0] if used else 0,
            rpc=(),
            heads=False,
            in_place=self.pair.draft is not None and reads_in_place(self.pair.draft),
            tapped_layers=(),
            n_branches=1,
            way_back=CELLS,
        )

    @property
    def assistant_options(self) -> TargetOptions:
        """The options by which the weights of an assistant are loaded: beside the target's logits,
        with all devices of the target, which may have the cells that it reads."""
        gpus = self.plan.gpus
        one = tuple(float(gpu.drafter > 0) for gpu in gpus) if len(gpus) > 1 else None
        options = self.target_options
        return replace(
            options,
            n_gpu_layers=-1 if options.n_gpu_layers else 0,
            n_cpu_moe=0,
            tensor_split=one,
            override_tensor={},
            override_kv={},
            in_place=False,
            tapped_layers=(),
        )

    @property
    def how_loaded(self) -> dict[str, Any]:
        """The options that a trial shares with the load, for JSON: other devices, tensors elsewhere
        than their layers, other values of keys."""
        options, plan = self.options, self.plan
        overrides = dict(options.override_tensor)
        if plan.n_cpu_moe:
            overrides.setdefault(experts_of(plan.n_cpu_moe), plan.host.name)
        found: dict[str, Any] = {"override_kv": dict(options.override_kv)}
        found["heads"] = isinstance(self.pair.spec, HeadsSpec)
        found["assistant"] = isinstance(self.pair.spec, AssistantSpec)
        if plan.n_gpu_layers and not options.rpc:
            found |= {"device": list(options.device), "overrides": overrides}
            found["tensor_split"] = plan.tensor_split if overrides else None
        if options.mmproj is not None:
            found["mmproj"] = [os.fspath(options.mmproj), *file_key(Path(options.mmproj))]
        return {name: value for name, value in found.items() if value}

    def lines(self) -> list[str]:
        """The setup in words."""
        found = [self.finding] if self.finding else []
        off = [_NO_WAY_BACK] if self.plain_because == _NO_WAY_BACK else []
        return [*found, *self.plan.lines(), *off]

    def check_width(self) -> None:
        """Refuse what no load of these files can verify in one pass. Raises InputError."""
        width, spec = self.options.draft_width, self.named.spec
        most, limit = MAX_OUTPUT_ROWS if spec else self.plan.most_rows, "a verify pass"
        if spec and not self._takes_trees:
            most, limit = min(spec.n_draft + 1, most), "this drafter's block"
        if isinstance(width, int) and width > most:
            raise InputError(f"draft_width is {width}; {limit} allows at most {most}")

    def check_exact(self) -> None:
        """Refuse exact answers to several requests at once where states cannot be kept apart.
        Raises InputError."""
        n_seq = self.options.n_seq
        if self.options.exact and n_seq > 1 and self.named.is_recurrent:
            raise InputError(
                "exact answers of a target with recurrent layers are computed one at a time, and "
                f"n_seq is {n_seq}; give n_seq=1"
            )

    def fitting(self) -> Setup:
        """This setup; where heads that nobody asked for do not fit, that of the target alone."""
        if self.named.by_default:
            try:
                self.plan  # noqa: B018
            except InputError:
                return self.without_heads(_NO_ROOM_FOR_HEADS)
        return self

    def without_heads(self, why: str) -> Setup:
        """The next setup where heads that nobody asked for cannot be used."""
        return replace(self, named=self.named.without_drafts(), finding=f"{NO_HEADS} {why}")

    def without_replay(self) -> Setup:
        """The next setup of a loaded target, which cannot replay rows here."""
        plan = self.plan
        options = replace(self.options, n_gpu_layers=plan.n_gpu_layers, n_cpu_moe=plan.n_cpu_moe)
        return replace(self, options=options, may_replay=False, finding=_NO_REPLAY)

    def with_snapshots(self, n: int) -> Setup:
        """The next setup where llama.cpp's graph has room for so many snapshots."""
        return replace(self, most_snapshots=n, finding=_FEWER_SNAPSHOTS.format(n))

    def without_drafts(self, why: str = _NO_GAIN) -> Setup:
        """The next setup of a loaded target: it alone, as drafting could not pay for its snapshots,
        or cannot be done."""
        plan, named = self.plan, self.named.without_drafts()
        options = replace(
            self.options, n_ctx=plan.n_ctx, n_gpu_layers=plan.n_gpu_layers, n_cpu_moe=plan.n_cpu_moe
        )
        return replace(self, named=named, options=options, finding=why)

    @cached_property
    def _choice(self) -> tuple[Pair, Plan, str | None]:
        """The pair that is loaded, its plan, and why nothing is drafted."""
        named, rows = self.named, self._n_rejected
        architecture = named.target.architecture
        if not rows:
            return named, self._planned(named), self.finding or None
        if self.may_replay and can_replay(architecture, self.devices, self.options.n_gpu_layers):
            plan = self._planned(named, WayBack("replay", rows))
            if plan.n_gpu_layers == 0 or plan.n_gpu_layers >= plan.n_layers - 1:
                return named, plan, None  # all layers that repeat are on one side
        rows = min(rows, self.most_snapshots) if architecture in SNAPSHOT_ARCHITECTURES else 0
        if rows and self.options.draft_width not in (0, 1):
            return named, self._planned(named, WayBack("snapshots", rows)), None
        plain = named.without_drafts()
        return plain, self._planned(plain), _NO_WIDTH if rows else _NO_WAY_BACK

    @property
    def _n_rejected(self) -> int:
        """The rows that must be taken back from a recurrent state if a whole draft is rejected, as
        far as a batch allows. 0 without such a state, and where nothing is drafted."""
        spec = self.named.spec
        if not self.named.is_recurrent or not (spec or self.named.copies):
            return 0
        most = min(spec.n_draft, MAX_OUTPUT_ROWS - 1) if spec else COPY_SNAPSHOTS
        return max(1, min(most, self.options.n_batch - SNAPSHOT_ROWS))

    def _planned(self, pair: Pair, way_back: WayBack = CELLS) -> Plan:
        options, files = self.options, (pair.target, pair.draft, pair.spec)
        if not isinstance(pair.spec, DrafterSpec):
            options = replace(options, draft_window=0)  # all others look at the whole text
        elif options.draft_window is None:
            options = replace(options, draft_window=draft_window_of(pair.draft))
        n_branches = self._n_branches(options.n_batch)
        return make_plan(*files, options, self.devices, n_branches, way_back)

    def _n_branches(self, n_batch: int) -> int:
        """Branches of each sequence. It is 1 if drafts are chains."""
        return branches_of_each(self.options.n_seq, n_batch) if self._takes_trees else 1

    @property
    def _takes_trees(self) -> bool:
        """A recurrent state follows one path. A language model and heads draft one path."""
        drafts_one = isinstance(self.named.spec, (ModelSpec, HeadsSpec, AssistantSpec))
        one_path = self.named.is_recurrent or drafts_one
        return self.shape != "chain" and not one_path

    def _may_copy(self, pair: Pair) -> bool:
        if pair.draft is not None or pair.copies:
            return True
        is_plain = self.options.exact or self.options.draft_width in (0, 1)
        return not is_plain and not pair.is_recurrent
